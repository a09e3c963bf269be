"""Temporal eigenstate network: a diagonal linear recurrence instead of attention.

Its work grows linearly with the tokens, and its memory of a document has a constant size.

Letters: B rows, T tokens, D width, V vocabulary, L layers, K eigenstates, E = 2 K; H heads of
         resonance, I and J eigenstates of a head, F width inside the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from flatout.distributed.context import Context
from flatout.distributed.tensor import Cut, Split, local
from flatout.models import layers
from flatout.models.language_model import Decoder, EmbeddingModel, Flops, LanguageModelConfig
from flatout.models.layers import Factor, Linear
from flatout.ops import Ops, at_least_fp32
from flatout.storage.json_io import JsonObject

GATE_BIAS = -2.0
"""An initial gate passes an eighth, so that each block changes little at first."""
LEAN_CHUNK = 64
"""Tokens per chunk at which the matrices of powers are small compared with the states."""
UNLIMITED = 2**40
"""Longer than any sequence."""


AUTO_CHUNK = {"cpu": 32, "cuda": 128}
"""Tokens per chunk by device: small matmuls are slow on a GPU, and large ones are more
work on a CPU.
"""
RESONANCE = 0.01
"""Factor of the coupling between eigenstates."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of this fraction of a circle stay apart from each other and from zero, however many
there are.
"""


class EigenstateConfig(LanguageModelConfig):
    """The shape of an eigenstate network."""

    rules = (
        (
            lambda shape: (
                shape.num_eigenstates % shape.num_heads
                and layers.nearest_divisor(shape.num_eigenstates, shape.num_heads)
            ),
            "model.num_eigenstates={0.num_eigenstates} is not divisible by "
            "model.num_heads={0.num_heads}.",
            "Set model.num_heads={1}.",
        ),
        (
            lambda shape: shape.max_seq_len and shape.positions == "none",
            "model.max_seq_len={0.max_seq_len} has no effect: without learned positions, an "
            "eigenstate network takes sequences of any length.",
            "Remove it, or set model.positions=learned.",
        ),
    )
    used_with: ClassVar[Mapping[str, str]] = {"memory": "initialisation=long-memory"}

    num_layers: int = Field(8, ge=1)
    """Blocks, each with one recurrence and one MLP (L)."""
    d_model: int = Field(512, ge=1)
    """Width of the hidden states (D)."""
    num_eigenstates: int = Field(64, ge=1)
    """Complex numbers in the state of a layer (K)."""
    num_heads: int = Field(4, ge=1)
    """Groups of eigenstates that are coupled with each other (H), a divisor of num_eigenstates."""
    chunk_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokens that the fast recurrence processes at once. auto means 32 on a CPU and 128 on a GPU.
    The value does not change results.
    """
    initialisation: Literal["long-memory", "published"] = "long-memory"
    """long-memory (time constants log-uniform up to `memory` tokens) or published (eigenvalues of
    at most one half: a memory of 7 tokens).
    """
    memory: int | None = Field(None, ge=2)
    """Longest initial time constant, in tokens. None means data.seq_len."""
    d_ff: int | None = Field(None, ge=1)
    """Width inside the MLP (F). None means 4 d_model."""
    bias: bool = False
    """Biases in the linear layers and the norms. The gate always has one."""
    positions: Literal["none", "learned"] = "none"
    """none (the recurrence knows the order) or learned (a vector per position, added to the
    embedding, which limits the sequence length).
    """
    max_seq_len: int | None = Field(None, ge=1)
    """Learned positions of the model. Sequences and prompts may be shorter. None means
    data.seq_len.
    """
    tied_head: bool = True
    """Use the embedding as the output weight too."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of components dropped from the embedding and from the output of each recurrence and
    MLP.
    """

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP, F."""
        return self.d_ff or 4 * self.d_model


class Eigenstate(EmbeddingModel):
    """Pre-norm blocks of a gated recurrence and an MLP."""

    draws_everything: ClassVar[bool] = True
    divides_rows: ClassVar[bool | None] = False
    Config: ClassVar[type[LanguageModelConfig]] = EigenstateConfig
    config: EigenstateConfig

    def __init__(self, config: EigenstateConfig, ops: Ops) -> None:
        super().__init__(config, ops)
        self.dropout = config.dropout
        self.token_embedding = layers.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = (
            layers.Embedding(config.max_seq_len or 1, config.d_model)
            if config.positions == "learned"
            else None
        )
        self.blocks = nn.ModuleList(Block(config, ops) for _ in range(config.num_layers))
        self.final_norm = layers.LayerNorm(config.d_model, bias=config.bias)
        self.unembedding = self.new_unembedding(tied=config.tied_head)
        self.init_weights()

    @classmethod
    def fitted(cls, config: EigenstateConfig, seq_len: int) -> EigenstateConfig:
        """Return the configuration with memory and learned positions for `seq_len` tokens.

        Raises: ConfigError when it has fewer positions.
        """
        has_memory = config.memory or config.initialisation == "published"
        unset: JsonObject = {} if has_memory else {"memory": max(seq_len, 2)}
        if config.positions == "learned" and config.max_seq_len is None:
            unset["max_seq_len"] = seq_len
        layers.check_positions(config.max_seq_len, seq_len)
        return config.model_copy(update=unset) if unset else config

    @classmethod
    def leanest(cls, config: EigenstateConfig) -> JsonObject:
        """Return a smaller chunk size: the matrices of powers grow with its square."""
        if config.chunk_size == "auto" or config.chunk_size <= LEAN_CHUNK:
            return {}
        return {"chunk_size": LEAN_CHUNK}

    def tensor_cuts(self) -> dict[str, Cut]:
        """Return how ranks share each parameter: by heads, and by columns inside the MLP."""
        count, inner = self.config.num_eigenstates, (self.config.mlp_width,)
        return self.cuts_by_ending(
            {
                "recurrence.drive": (0, (count, count)),
                "recurrence.output": (1, (count, count)),
                "recurrence.coupling": (0, (count,)),
                "log_rate": (0, (count,)),
                "detuning": (0, (count,)),
                "mlp.up": (0, inner),
                "mlp.down": (1, inner),
            }
        )

    def share_layers(self, split: Split, *, seq_len: int) -> None:
        """Let this rank compute some heads of eigenstates, as `LanguageModel.share_layers`.

        Raises: ConfigError also when the ranks cannot divide the heads or the MLP.
        """
        self.check_shares(split, "model.num_heads", self.config.num_heads, grows=False)
        self.check_shares(split, "model.d_ff", self.config.mlp_width)
        super().share_layers(split, seq_len=seq_len)
        for eigenvalues in self._eigenvalues():
            eigenvalues.first = split.rank * self.config.num_eigenstates // split.size

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the model accepts: any, if it has no learned positions."""
        return self.config.max_seq_len or UNLIMITED

    def decoder(self, max_tokens: int | None = None) -> Decoder:
        """Return a decoder that keeps the state of each layer, in constant memory.

        Without learned positions its length is unlimited.

        Memory: 2 L B K fp32 numbers.
        """
        is_limited = self.position_embedding is not None
        return RecurrentDecoder(self, self.token_limit(max_tokens) if is_limited else None)

    def init_weights(self) -> None:
        """Initialise every parameter as in GPT-2, but gate biases with -2, and the eigenvalues."""
        super().init_weights()
        for block in self.blocks:
            nn.init.constant_(block.recurrence.gate.bias, GATE_BIAS)  # type: ignore[union-attr, arg-type]
        for eigenvalues in self._eigenvalues():
            eigenvalues.init_weights()

    def own_stds(self) -> dict[str, float]:
        """Return those of the drive, which has unit variance at any width, and of the coupling."""
        return {"drive": self.config.d_model**-0.5, "coupling": 1.0}

    def _eigenvalues(self) -> list[Eigenvalues]:
        return [module for module in self.modules() if isinstance(module, Eigenvalues)]

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the training FLOPs per token, which do not depend on the sequence length.

        The coupling multiplies both real and imaginary parts, so it counts twice. The recurrence
        itself is not a matmul and does not count.
        """
        couplings = (p.numel() for name, p in self.named_parameters() if name.endswith("coupling"))
        total = self.matmul_flops() + 6 * sum(couplings)
        return Flops(total, Fraction(total))

    def shared_bytes(self, seq_len: int) -> float:
        """Return the bytes of a state in all layers, and of its gradient, divided by the tokens."""
        return 16.0 * self.config.num_layers * self.config.num_eigenstates / seq_len

    def stacked_by_ending(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of the real and imaginary drive, and of each head's coupling."""
        count, heads = self.config.num_eigenstates, self.config.num_heads
        return {"drive.weight": (count, count), "coupling": (count // heads,) * heads}


class Block(layers.ResidualBlock):
    """A gated recurrence and an MLP. Each reads normalised hidden states and adds to them."""

    def __init__(self, config: EigenstateConfig, ops: Ops) -> None:
        super().__init__()
        width, bias = config.d_model, config.bias
        self.recurrence_norm = layers.LayerNorm(width, bias=bias)
        self.recurrence = Recurrence(config, ops)
        self.mlp_norm = layers.LayerNorm(width, bias=bias)
        self.mlp = layers.MLP(
            width, config.mlp_width, activation=functional.silu, bias=bias, ops=ops
        )
        self.dropout = config.dropout

    def forward(
        self,
        hidden_BTD: Tensor,
        doc_ids_BT: Tensor | None = None,
        shared: None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the hidden states after this block.

        With a context, the tokens are this rank's, and the document ids those of whole rows.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        read_BTD = self.recurrence(self.recurrence_norm(hidden_BTD), doc_ids_BT, context)
        return self.added(hidden_BTD, read_BTD)

    def decode(self, hidden_BTD: Tensor, state_BE: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the next tokens of a document, and the state after them.

        Shapes:  hidden_BTD (B, T, D); state_BE (B, E), None at the start of the document.
        Returns: (hidden_BTD, state_BE).
        """
        normed_BTD = self.recurrence_norm(hidden_BTD)
        states_BTE = self.recurrence.states(normed_BTD, start_BE=state_BE)
        read_BTD = self.recurrence.read(normed_BTD, states_BTE)
        return self.added(hidden_BTD, read_BTD), states_BTE[:, -1]


@final
class RecurrentDecoder(Decoder):
    """Decodes with the recurrent state of each layer."""

    def __init__(self, model: Eigenstate, max_tokens: int | None) -> None:
        super().__init__(max_tokens)
        self._model = model
        self._states: list[Tensor | None] = [None] * len(model.blocks)

    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits after these tokens, computed from them and the states before them.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """
        end = self.num_tokens + tokens_BT.shape[1]
        hidden_BTD = self._model.embed(tokens_BT, [(self.num_tokens, end)])
        for i, block in enumerate(self._model.blocks):
            hidden_BTD, self._states[i] = block.decode(hidden_BTD, self._states[i])  # type: ignore[operator]
        return self._model.last_logits(hidden_BTD)


class Eigenvalues(nn.Module):
    """The learned eigenvalues of one recurrence, which all tokens share."""

    def __init__(self, config: EigenstateConfig) -> None:
        super().__init__()
        self.config = config
        self.first = 0
        """The first eigenstate of this rank."""
        self.log_rate = nn.Parameter(torch.zeros(config.num_eigenstates))
        """Logarithm of the decay rate: |eigenvalue| = exp(-exp(log_rate)), below 1 for any learned
        value.
        """
        self.detuning = nn.Parameter(torch.zeros(config.num_eigenstates))
        """Angle relative to the eigenstate's initial angle, in units of the decay rate."""

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw time constants: log-uniformly up to `model.memory` tokens, or the published ones."""
        if self.config.initialisation == "published":
            magnitude = torch.empty_like(self.log_rate).uniform_(-3, 0).sigmoid_()
            self.log_rate.copy_(magnitude.log_().neg_().log_())
        else:
            self.log_rate.uniform_(-math.log(self.config.memory or 2), 0.0)
        self.detuning.zero_()

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return logarithms of magnitudes, and angles.

        The initial angles are spread over the whole circle. Learned angles are relative to them, in
        units of the decay rate. If angles were learned in radians, one optimizer step would rotate
        old states by whole circles. An angle near zero would accumulate what all tokens have in
        common, and drown what distinguishes them.

        Returns: (log_decay_K, angle_K).
        """
        rate_K = at_least_fp32(local(self.log_rate)).exp()
        index_K = torch.arange(1, len(rate_K) + 1, device=rate_K.device, dtype=torch.float64)
        if self.first:
            index_K += self.first
        initial_K = (2 * math.pi * (index_K * GOLDEN).frac()).to(rate_K.dtype)
        return -rate_K, initial_K + rate_K * local(self.detuning)


class Recurrence(nn.Module):
    """Drive, eigenstates, resonance, and back to the model's width through a gate."""

    def __init__(self, config: EigenstateConfig, ops: Ops) -> None:
        super().__init__()
        width, count, bias = config.d_model, config.num_eigenstates, config.bias
        self.config = config
        self.ops = ops
        self.drive = Factor(width, 2 * count, bias=bias, ops=ops)
        self.gate = Linear(width, width, bias=True, ops=ops)
        self.output = Factor(2 * count, width, bias=bias, ops=ops)
        self.eigenvalues = Eigenvalues(config)
        self.coupling = nn.Parameter(torch.zeros(count, count // config.num_heads))

    def forward(
        self,
        hidden_BTD: Tensor,
        doc_ids_BT: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the output for each token, computed from the tokens up to it.

        With a context, the tokens are this rank's, and the document ids those of whole rows.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        states_BTE = self.states(hidden_BTD, doc_ids_BT, context)
        return self.read(hidden_BTD, states_BTE)

    def states(
        self,
        hidden_BTD: Tensor,
        doc_ids_BT: Tensor | None = None,
        context: Context | None = None,
        start_BE: Tensor | None = None,
    ) -> Tensor:
        """Return the state after each token, in the dtype of `ops.scan`.

        The drive is multiplied by a gain for which states keep its variance.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers; start_BE (B, E), zeros when None.
        Returns: states_BTE.
        """
        log_decay_K, angle_K = self.eigenvalues()
        gain_K = (-torch.expm1(2 * log_decay_K)).sqrt()
        drive_BTE = self.drive(hidden_BTD) * torch.cat((gain_K, gain_K))
        chunk_size = self.config.chunk_size
        if chunk_size == "auto":
            chunk_size = AUTO_CHUNK.get(drive_BTE.device.type, AUTO_CHUNK["cuda"])
        own_BT = doc_ids_BT
        if context is not None and doc_ids_BT is not None:
            own_BT = context.own(doc_ids_BT)
        states_BTE: Tensor = self.ops.scan(
            log_decay_K,
            angle_K,
            drive_BTE,
            doc_ids_BT=own_BT,
            start_BE=start_BE,
            chunk_size=chunk_size,
        )
        if context is None:
            return states_BTE
        num_tokens = states_BTE.shape[1]
        return states_BTE + context.carried(
            states_BTE[:, -1], log_decay_K, angle_K, num_tokens, doc_ids_BT
        )

    def read(self, hidden_BTD: Tensor, states_BTE: Tensor) -> Tensor:
        """Return the output for the states after each token.

        Shapes:  hidden_BTD (B, T, D); states_BTE (B, T, E).
        Returns: hidden_BTD.
        """
        states_BTE = self._coupled(states_BTE)
        if states_BTE.dtype.itemsize > hidden_BTD.dtype.itemsize:
            states_BTE = states_BTE.to(hidden_BTD.dtype)
        gate_BTD: Tensor = self.gate(hidden_BTD).sigmoid()
        read_BTD: Tensor = self.output(states_BTE)
        return gate_BTD * read_BTD

    def _coupled(self, states_BTE: Tensor) -> Tensor:
        """Add to each eigenstate a little of the others of its head.

        Cost: 4 B T K J FLOP for J eigenstates per head.
        """
        size = self.coupling.shape[1]
        coupling_HJI = local(self.coupling).to(states_BTE.dtype).view(-1, size, size)
        states_BT2HI = states_BTE.view(*states_BTE.shape[:-1], 2, *coupling_HJI.shape[:2])
        added_BT2HJ = torch.einsum("btghi,hji->btghj", states_BT2HI, coupling_HJI)
        return states_BTE + RESONANCE * added_BT2HJ.flatten(2)


USES = ("linear", "scan")
MODEL = Eigenstate
