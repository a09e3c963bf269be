"""Temporal eigenstate network: a diagonal linear recurrence in place of attention. Work grows with
the tokens, memory of a text does not.

Letters: B rows, T tokens, D width, V vocabulary, L layers, K eigenstates, E = 2 K, H heads of
         resonance, F width inside the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, final

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from flatout.errors import ConfigError
from flatout.models import layers
from flatout.models.averaging import Groups, averaged, repeated, spread
from flatout.models.decoding import Decoder
from flatout.models.language_model import (
    Flops,
    LanguageModel,
    LanguageModelConfig,
    ParameterKind,
    kind_by_name,
)
from flatout.ops import Ops, at_least_fp32
from flatout.ops.folding import Weights, coupled, scaled

INIT_STD = 0.02
"""Standard deviation of fresh weights."""
GATE_BIAS = -2.0
"""A fresh gate lets an eighth through, so that a block begins close to doing nothing."""
AUTO_CHUNK = {"cpu": 32, "cuda": 128}
"""Tokens of a chunk that suit a device: products with small matrices are slow on a GPU, and large
ones are more work on a CPU.
"""
LEAN_CHUNK = 64
"""Tokens of a chunk whose matrices of powers are small beside the states."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of this share of a circle stay apart from each other and from zero, however many there
are.
"""
UNLIMITED = 2**40
"""Tokens in a row that it takes: more than there are."""


class EigenstateConfig(LanguageModelConfig):
    """The model's shape."""

    num_layers: int = Field(8, ge=1)
    """Blocks, each one recurrence and one MLP (L)."""
    d_model: int = Field(512, ge=1)
    """Width of the hidden states (D)."""
    num_eigenstates: int = Field(64, ge=1)
    """Complex numbers that a layer remembers a text by (K)."""
    num_heads: int = Field(4, ge=1)
    """Groups of eigenstates that are coupled among themselves (H), a divisor of num_eigenstates."""
    chunk_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokens that the fast recurrence takes at once; auto takes 32 on a CPU and 128 on a GPU,
    wherever the run is. It changes no result.
    """
    eigenvalues: Literal["fixed", "selective"] = "fixed"
    """fixed (learned, one for all tokens) or selective (how long an eigenstate remembers depends on
    the token).
    """
    scales: tuple[int, ...] = (1,)
    """Tokens that are averaged before a recurrence sees them, for each of several beside each
    other: [1, 2, 4, 8] is the hierarchical form.
    """
    initialisation: Literal["long-memory", "published"] = "long-memory"
    """long-memory (time constants log-uniform up to `memory` tokens) or published (a factor of at
    most one half: 7 tokens).
    """
    memory: int | None = Field(None, ge=2)
    """Longest time constant of a fresh model, in tokens; None takes data.seq_len."""
    d_ff: int | None = Field(None, ge=1)
    """Width inside the MLP (F); None is 4 d_model."""
    bias: bool = False
    """Biases in the linear layers and the norms; the gate always has one."""
    tied_head: bool = True
    """The embedding is the output weight too."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of components dropped from the embedding and from what each recurrence and MLP adds."""

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP, F."""
        return self.d_ff or 4 * self.d_model

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_eigenstates % self.num_heads:
            divisors = [
                count
                for count in range(1, self.num_eigenstates + 1)
                if self.num_eigenstates % count == 0
            ]
            nearest = min(divisors, key=lambda count: abs(count - self.num_heads))
            raise ConfigError(
                f"model.num_eigenstates={self.num_eigenstates} does not divide into model.num_heads={self.num_heads}.",
                fix=f"Set model.num_heads={nearest}.",
            )
        if not self.scales or min(self.scales) < 1 or len(set(self.scales)) < len(self.scales):
            raise ConfigError(
                f"model.scales={list(self.scales)} are not different numbers of tokens.",
                fix="Set model.scales=[1,2,4,8].",
            )
        if self.eigenvalues == "selective" and self.scales != (1,):
            raise ConfigError(
                "model.eigenvalues=selective gives each token its own, and model.scales averages tokens.",
                fix="Set model.scales=[1], or fixed.",
            )
        return self


class Eigenstate(LanguageModel):
    """Pre-norm blocks of a gated recurrence and an MLP."""

    Config: ClassVar[type[LanguageModelConfig]] = EigenstateConfig
    config: EigenstateConfig

    def __init__(self, config: EigenstateConfig, ops: Ops) -> None:
        super().__init__(config, ops)
        self.token_embedding = layers.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, ops) for _ in range(config.num_layers))
        self.final_norm = layers.LayerNorm(config.d_model, bias=config.bias)
        self.unembedding = (
            None
            if config.tied_head
            else layers.Linear(config.d_model, config.vocab_size, bias=False, ops=ops)
        )
        self.init_weights()

    @classmethod
    def fitted(cls, config: EigenstateConfig, seq_len: int) -> EigenstateConfig:
        """Return the configuration with a memory as long as a window, where it states none."""
        return config if config.memory else config.model_copy(update={"memory": max(seq_len, 2)})

    @classmethod
    def leanest(cls, config: EigenstateConfig) -> Mapping[str, Any]:
        """Return a smaller chunk: a chunk's matrices of powers take its size squared."""
        return (
            {"chunk_size": LEAN_CHUNK}
            if config.chunk_size != "auto" and config.chunk_size > LEAN_CHUNK
            else {}
        )

    @property
    def max_seq_len(self) -> int:
        """Most tokens in a row that the model takes: as many as there are."""
        return UNLIMITED

    def decoder(self, max_tokens: int | None = None) -> Decoder:
        """Return a reader of one text a row that carries each layer's state: constant memory and no
        limit, however long the text.

        Memory: 2 L B K fp32 numbers for each of `model.scales`, and the drive of as many tokens as
                the largest of them.
        """
        return Carrying(self)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return each token's vector.

        Shapes:  tokens_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        return layers.dropped(self.token_embedding(tokens_BT), self.config.dropout, self.training)

    def head(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised hidden states and the output weight.

        Shapes:  hidden_BTD (B, T, D).
        Returns: (hidden_BTD, weight_VD).
        """
        output = self.token_embedding if self.unembedding is None else self.unembedding
        return self.final_norm(hidden_BTD), output.weight

    def init_weights(self) -> None:
        """Fill every parameter anew: matrices normal(0, 0.02), biases 0, norms 1, gates' biases -2,
        eigenvalues as `model.initialisation` says.

        The two matrices of a block that add to the hidden states get 0.02 / sqrt(2 L), as in GPT-2;
        the drive's, which follows a norm, gets 1 / sqrt(D): a drive of unit variance at any width.
        """
        added_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        stds = {
            "drive": self.config.d_model**-0.5,
            "output": added_std,
            "down": added_std,
            "selection": 0.0,
            "coupling": 1.0,
        }
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.constant_(parameter, GATE_BIAS if name.endswith("gate.bias") else 0.0)
            elif parameter.dim() == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith("share") else 1.0)
            else:
                nn.init.normal_(
                    parameter,
                    std=stds.get(name.removesuffix(".weight").rpartition(".")[-1], INIT_STD),
                )
        for module in self.modules():
            if isinstance(module, Memory):
                module.init_eigenvalues(self.config)

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the training FLOPs a token: 6 N over the hidden matrices and the head, whatever
        the length of the window.

        The coupling of eigenstates is multiplied with real and imaginary parts. The recurrence
        itself is no matrix product by its definition.
        """
        config = self.config
        kinds = self.parameter_kinds()
        counted = sum(
            p.numel() * (2 if name.endswith("coupling") else 1)
            for name, p in self.named_parameters()
            if kinds[name] == "hidden"
        )
        total = 6 * (counted + config.vocab_size * config.d_model)
        return Flops(palm=total, causal_exact=Fraction(total))

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Return the kind of every parameter by its name; eigenvalues are vectors, a tied head is
        an embedding.
        """
        return {name: kind_by_name(name, parameter) for name, parameter in self.named_parameters()}

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of the real and imaginary drive, and of each head's coupling."""
        count, heads = self.config.num_eigenstates, self.config.num_heads
        parts = {"drive.weight": (count, count), "coupling": (count // heads,) * heads}
        return {
            name: rows
            for name, _ in self.named_parameters()
            for ending, rows in parts.items()
            if name.endswith(ending)
        }


class Block(nn.Module):
    """A gated recurrence and an MLP, each on normalised hidden states and added to them."""

    def __init__(self, config: EigenstateConfig, ops: Ops) -> None:
        super().__init__()
        self.recurrence_norm = layers.LayerNorm(config.d_model, bias=config.bias)
        self.recurrence = Recurrence(config, ops)
        self.mlp_norm = layers.LayerNorm(config.d_model, bias=config.bias)
        self.mlp = layers.MLP(
            config.d_model, config.mlp_width, activation=functional.silu, bias=config.bias, ops=ops
        )
        self.dropout = config.dropout

    def forward(self, hidden_BTD: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
        """Return the hidden states after this block.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        return self._added(
            hidden_BTD, self.recurrence(self.recurrence_norm(hidden_BTD), doc_ids_BT)
        )

    def decode(self, hidden_BTD: Tensor, carried: list[Carried], start: int) -> Tensor:
        """Return the hidden states after this block of tokens that go on from what is carried, and
        carry on.

        Shapes:  hidden_BTD (B, T, D), at the positions from `start` on.
        Returns: hidden_BTD.
        """
        return self._added(
            hidden_BTD, self.recurrence.decode(self.recurrence_norm(hidden_BTD), carried, start)
        )

    def _added(self, hidden_BTD: Tensor, remembered_BTD: Tensor) -> Tensor:
        hidden_BTD = hidden_BTD + layers.dropped(remembered_BTD, self.dropout, self.training)
        return hidden_BTD + layers.dropped(
            self.mlp(self.mlp_norm(hidden_BTD)), self.dropout, self.training
        )


class Recurrence(nn.Module):
    """Drive, eigenstates, resonance, and back to the model's width through a gate."""

    def __init__(self, config: EigenstateConfig, ops: Ops) -> None:
        super().__init__()
        linear: Callable[..., layers.Linear] = partial(layers.Linear, ops=ops)
        count, width = config.num_eigenstates, config.d_model
        self.ops = ops
        self.drive = linear(width, 2 * count, bias=config.bias)
        self.gate = linear(width, width, bias=True)
        self.output = linear(2 * count, width, bias=config.bias)
        self.selection = (
            linear(width, count, bias=True) if config.eigenvalues == "selective" else None
        )
        self.memories = nn.ModuleList(Memory(config, scale, ops) for scale in config.scales)
        self.share = (
            nn.Parameter(torch.zeros(len(config.scales))) if len(config.scales) > 1 else None
        )
        self.coupling = nn.Parameter(torch.zeros(count, count // config.num_heads))

    def forward(self, hidden_BTD: Tensor, doc_ids_BT: Tensor | None) -> Tensor:
        """Return what each token is told of the tokens up to it.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        return self._told(
            hidden_BTD, [partial(memory, doc_ids_BT=doc_ids_BT) for memory in self.memories]
        )

    def decode(self, hidden_BTD: Tensor, carried: list[Carried], start: int) -> Tensor:
        """Return the same of tokens that go on from what is carried.

        Shapes:  hidden_BTD (B, T, D), at the positions from `start` on.
        Returns: hidden_BTD.
        """
        pairs: Any = zip(self.memories, carried, strict=True)
        return self._told(
            hidden_BTD, [partial(memory.decode, carried=own, start=start) for memory, own in pairs]
        )

    def _told(self, hidden_BTD: Tensor, remembering: list[Callable[..., Tensor]]) -> Tensor:
        """Go from the hidden states to the drive, through each memory, and back. A pace says how
        much faster than usual it forgets: 0 to 2 times.
        """
        pace_BTK = (
            None
            if self.selection is None
            else 2 * at_least_fp32(self.selection(hidden_BTD)).sigmoid()
        )
        eigenvalues = [memory.eigenvalues(pace_BTK) for memory in self.memories]  # type: ignore[operator]
        gains = tuple((-torch.expm1(2 * log_decay)).sqrt() for log_decay, _ in eigenvalues)
        weights = self.ops.folding(
            Weights(self.drive.weight, self.drive.bias, gains, self.coupling, self.output.weight)
        )
        drive_BTE = self.ops.linear(hidden_BTD, weights.drive, weights.bias)
        states = [
            remember(drive_BTE, *each)
            for remember, *each in zip(remembering, weights.gains, eigenvalues, strict=True)
        ]
        states_BTE = (
            states[0]
            if self.share is None
            else (torch.stack(states) * self.share.softmax(dim=0)[:, None, None, None]).sum(dim=0)
        )
        states_BTE = coupled(states_BTE, weights.coupling)
        if states_BTE.dtype.itemsize > hidden_BTD.dtype.itemsize:
            states_BTE = states_BTE.to(hidden_BTD.dtype)
        gate_BTD: Tensor = self.gate(hidden_BTD).sigmoid()
        return gate_BTD * self.ops.linear(states_BTE, weights.output, self.output.bias)


@dataclass
class Carried:
    """What one memory carries from one piece of a text to the next."""

    state: Tensor | None = None
    """The last state (B, E); None before the first."""
    waiting: Tensor | None = None
    """Drive (B, T, E) of tokens that wait until there are `scale` of them."""


class Memory(nn.Module):
    """Eigenstates that are driven by every `scale` tokens' average, and known from the last of
    these tokens on.
    """

    def __init__(self, config: EigenstateConfig, scale: int, ops: Ops) -> None:
        super().__init__()
        self.scale = scale
        self.chunk_size = config.chunk_size
        self.ops = ops
        self.log_rate = nn.Parameter(torch.zeros(config.num_eigenstates))
        """Logarithm of what is forgotten a step: |eigenvalue| = exp(-exp(log_rate)), below 1
        whatever is learned.
        """
        self.detuning = nn.Parameter(torch.zeros(config.num_eigenstates))
        """Angle beyond the eigenstate's place on the circle, in units of what is forgotten a step:
        see `eigenvalues`.
        """

    @torch.no_grad()
    def init_eigenvalues(self, config: EigenstateConfig) -> None:
        """Draw time constants log-uniform up to the memory; or as published, where nothing lasts."""
        if config.initialisation == "published":
            magnitude = torch.empty_like(self.log_rate).uniform_(-3, 0).sigmoid_()
            self.log_rate.copy_(magnitude.log_().neg_().log_())
        else:
            self.log_rate.uniform_(-math.log(max((config.memory or 2) / self.scale, 2.0)), 0.0)
        self.detuning.zero_()

    def forward(
        self,
        drive_BTE: Tensor,
        gain: Tensor | None,
        eigenvalues: tuple[Tensor, Tensor],
        doc_ids_BT: Tensor | None,
    ) -> Tensor:
        """Return the states that each token may know of, the drive multiplied by `gain`.

        Shapes:  drive_BTE (B, T, E); gain (K,) or (B, T, K), None is 1; eigenvalues as
                 `eigenvalues` returns them; doc_ids_BT (B, T) integers.
        Returns: states_BTE, in the type that `ops.scan` gives.
        """
        tokens = drive_BTE.shape[1]
        if self.scale == 1 or doc_ids_BT is None:
            states_BNE = self._states(
                scaled(self._averaged(drive_BTE), gain), eigenvalues, doc_ids_BT, None
            )
            return self._known(states_BNE, None, 0, tokens)
        if tokens < self.scale:
            return at_least_fp32(torch.zeros_like(drive_BTE))
        groups = Groups.of(doc_ids_BT, self.scale)
        drive_BNE = scaled(averaged(drive_BTE, self.scale, groups), gain)
        return spread(
            self._states(drive_BNE, eigenvalues, groups.document, None), self.scale, groups
        )

    def decode(
        self,
        drive_BTE: Tensor,
        gain: Tensor | None,
        eigenvalues: tuple[Tensor, Tensor],
        carried: Carried,
        start: int,
    ) -> Tensor:
        """Return the same for tokens that go on from what is carried, and carry on; at least in
        fp32, whatever `ops.scan` would give.

        Shapes:  drive_BTE (B, T, E), at the positions from `start` on; gain and eigenvalues as in
                 `forward`.
        Returns: states_BTE.
        """
        tokens = drive_BTE.shape[1]
        if carried.waiting is not None:
            drive_BTE = torch.cat((carried.waiting, drive_BTE), dim=1)
        states_BNE = self._states(
            scaled(at_least_fp32(self._averaged(drive_BTE)), gain), eigenvalues, None, carried.state
        )
        known_BTE = self._known(states_BNE, carried.state, start, tokens)
        carried.waiting = (
            drive_BTE[:, drive_BTE.shape[1] // self.scale * self.scale :]
            if self.scale > 1
            else None
        )
        carried.state = states_BNE[:, -1] if states_BNE.shape[1] else carried.state
        return known_BTE

    def _averaged(self, drive_BTE: Tensor) -> Tensor:
        """The mean of every full group of one document."""
        return drive_BTE if self.scale == 1 else averaged(drive_BTE, self.scale, None)

    def eigenvalues(self, pace_BTK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logarithms of magnitudes, and angles. Angles are places all round the circle,
        moved in units of what is forgotten a step.

        Were they learned in radians, one step of an optimiser would turn what was said long ago by
        whole circles. An angle near zero would add up what every token says alike, and drown what
        one of them said.

        Shapes:  pace_BTK (B, T, K), None is 1.
        Returns: (log_decay, angle), both (K,), or (B, T, K) with a pace.
        """
        rate_K = at_least_fp32(self.log_rate).exp()
        place_K = torch.arange(1, len(rate_K) + 1, device=rate_K.device, dtype=torch.float64)
        angle_K = (2 * math.pi * (place_K * GOLDEN).frac()).to(
            rate_K.dtype
        ) + rate_K * self.detuning
        return (
            (-rate_K, angle_K)
            if pace_BTK is None
            else (-rate_K * pace_BTK, angle_K.expand_as(pace_BTK))
        )

    def _states(
        self,
        drive_BNE: Tensor,
        eigenvalues: tuple[Tensor, Tensor],
        doc_ids_BN: Tensor | None,
        start_BE: Tensor | None,
    ) -> Tensor:
        if not drive_BNE.shape[1]:
            return at_least_fp32(drive_BNE)
        chunk_size = (
            AUTO_CHUNK.get(drive_BNE.device.type, AUTO_CHUNK["cuda"])
            if self.chunk_size == "auto"
            else self.chunk_size
        )
        return self.ops.scan(
            *eigenvalues, drive_BNE, doc_ids_BT=doc_ids_BN, start_BE=start_BE, chunk_size=chunk_size
        )

    def _known(
        self, states_BNE: Tensor, before_BE: Tensor | None, start: int, tokens: int
    ) -> Tensor:
        """For each token from `start` on, the state of the last group that is complete with it;
        `before_BE`, or zero, before the first.
        """
        if self.scale == 1:
            return states_BNE
        first_BE = (
            states_BNE.new_zeros(states_BNE.shape[0], states_BNE.shape[2])
            if before_BE is None
            else before_BE
        )
        known_BUE = repeated(torch.cat((first_BE[:, None], states_BNE), dim=1), self.scale)
        return known_BUE[:, start % self.scale + 1 :][:, :tokens]


@final
class Carrying(Decoder):
    """A network that carries its states from token to token."""

    def __init__(self, model: Eigenstate) -> None:
        super().__init__(None)
        self._model = model
        self._carried = [[Carried() for _ in model.config.scales] for _ in model.blocks]

    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Return the scores after these tokens, from them and from the states that those before
        left.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """
        hidden_BTD = self._model.embed(tokens_BT)
        for block, carried in zip(self._model.blocks, self._carried, strict=True):
            hidden_BTD = block.decode(hidden_BTD, carried, self.num_tokens)  # type: ignore[operator]
        return self._model.last_logits(hidden_BTD)


USES = ("linear", "scan", "folding")
MODEL = Eigenstate
