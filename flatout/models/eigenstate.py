"""Temporal eigenstate network: a diagonal linear recurrence instead of attention.

Its work grows linearly with the tokens, and its memory of a document has a constant size.

Letters: B rows, T tokens, N groups of S tokens, D width, V vocabulary, L layers, K eigenstates,
         E = 2 K; H heads of resonance, I and J eigenstates of a head, F width inside the MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, Self, final

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from flatout.distributed.context import Context
from flatout.distributed.tensor import Cut, Split, local
from flatout.errors import ConfigError
from flatout.models import layers
from flatout.models.language_model import Decoder, EmbeddingModel, Flops, LanguageModelConfig
from flatout.models.layers import Factor, Linear
from flatout.ops import Ops, at_least_fp32
from flatout.storage.json_io import JsonObject

INIT_STD = 0.02
"""Standard deviation of initial weights."""
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
    eigenvalues: Literal["fixed", "selective"] = "fixed"
    """fixed (learned, the same for all tokens) or selective (the token determines how fast an
    eigenstate decays).
    """
    scales: tuple[int, ...] = (1,)
    """Tokens averaged per step, one number for each of several parallel recurrences. [1, 2, 4, 8]
    is the hierarchical form.
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_eigenstates % self.num_heads:
            divisor = layers.nearest_divisor(self.num_eigenstates, self.num_heads)
            raise ConfigError(
                f"model.num_eigenstates={self.num_eigenstates} is not divisible by "
                f"model.num_heads={self.num_heads}.",
                fix=f"Set model.num_heads={divisor}.",
            )
        if not self.scales or min(self.scales) < 1 or len(set(self.scales)) < len(self.scales):
            raise ConfigError(
                f"model.scales={list(self.scales)} must be different positive numbers of tokens.",
                fix="Set model.scales=[1,2,4,8].",
            )
        if self.eigenvalues == "selective" and self.scales != (1,):
            raise ConfigError(
                "model.eigenvalues=selective computes eigenvalues per token, and model.scales "
                "averages tokens.",
                fix="Set model.scales=[1], or model.eigenvalues=fixed.",
            )
        if self.max_seq_len and self.positions == "none":
            raise ConfigError(
                f"model.max_seq_len={self.max_seq_len} has no effect: without learned positions, "
                "an eigenstate network takes sequences of any length.",
                fix="Remove it, or set model.positions=learned.",
            )
        return self


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
        unset: JsonObject = {} if config.memory else {"memory": max(seq_len, 2)}
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

    def share_rows(self, context: Context, *, seq_len: int, has_documents: bool) -> None:
        """Let `forward` compute this rank's part of each row, of whole groups of every scale.

        Raises: ConfigError when groups would cross the borders of parts.
        """
        least = math.lcm(*self.config.scales)
        if least > 1 and (has_documents or seq_len % (least * context.size)):
            raise ConfigError(
                f"model.scales={list(self.config.scales)} average tokens across the parts of a row "
                f"that parallel.context={context.size} makes.",
                fix=f"Set data.seq_len to a multiple of {least * context.size} and "
                "data.document_mask=false, or model.scales=[1].",
            )
        super().share_rows(context, seq_len=seq_len, has_documents=has_documents)

    def tensor_cuts(self) -> dict[str, Cut]:
        """Return how ranks share each parameter: by heads, and by columns inside the MLP."""
        count, inner = self.config.num_eigenstates, (self.config.mlp_width,)
        return self.cuts_by_ending(
            {
                "recurrence.drive": (0, (count, count)),
                "recurrence.output": (1, (count, count)),
                "recurrence.selection": (0, (count,)),
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
        for module in self.modules():
            if isinstance(module, Memory):
                module.first = split.rank * self.config.num_eigenstates // split.size

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the model accepts: any, if it has no learned positions."""
        return self.config.max_seq_len or UNLIMITED

    def decoder(self, max_tokens: int | None = None) -> Decoder:
        """Return a decoder that keeps the state of each layer, in constant memory.

        Without learned positions its length is unlimited.

        Memory: 2 L B K fp32 numbers for each of `model.scales`, and the drive of as many tokens as
                the largest of them.
        """
        is_limited = self.position_embedding is not None
        return RecurrentDecoder(self, self.token_limit(max_tokens) if is_limited else None)

    def init_weights(self) -> None:
        """Initialise every parameter.

        Matrices are normal(0, 0.02), biases 0, norms 1, gate biases -2, and eigenvalues follow
        `model.initialisation`. The two matrices of a block that add to the hidden states get 0.02 /
        sqrt(2 L), as in GPT-2. The drive's, which follows a norm, gets 1 / sqrt(D): a drive of unit
        variance at any width.
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        stds = {
            "drive": self.config.d_model**-0.5,
            "output": residual_std,
            "down": residual_std,
            "selection": 0.0,
            "coupling": 1.0,
        }
        for name, parameter in self.own_parameters():
            if name.endswith("bias"):
                nn.init.constant_(parameter, GATE_BIAS if name.endswith("gate.bias") else 0.0)
            elif parameter.dim() == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith("share") else 1.0)
            else:
                last = name.removesuffix(".weight").rpartition(".")[-1]
                nn.init.normal_(parameter, std=stds.get(last, INIT_STD))
        for module in self.modules():
            if isinstance(module, Memory):
                module.init_eigenvalues()

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the training FLOPs per token, which do not depend on the sequence length.

        The coupling multiplies both real and imaginary parts, so it counts twice. The recurrence
        itself is not a matmul and does not count.
        """
        couplings = (p.numel() for name, p in self.named_parameters() if name.endswith("coupling"))
        total = self.matmul_flops() + 6 * sum(couplings)
        return Flops(palm=total, causal_exact=Fraction(total))

    def shared_bytes(self, seq_len: int) -> float:
        """Return the bytes of a state in all layers, and of its gradient, divided by the tokens."""
        config = self.config
        numbers = 2 * config.num_eigenstates * len(config.scales)
        if config.eigenvalues == "selective":  # how much of a state is left, too
            numbers *= 2
        return 8.0 * config.num_layers * numbers / seq_len

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

    def decode(self, hidden_BTD: Tensor, states: list[MemoryState], start: int) -> Tensor:
        """Return the hidden states of the next tokens of a document, and update the states.

        Shapes:  hidden_BTD (B, T, D), at the positions from `start` on.
        Returns: hidden_BTD.
        """
        normed_BTD = self.recurrence_norm(hidden_BTD)
        read_BTD = self.recurrence(normed_BTD, carried=states, start=start)
        return self.added(hidden_BTD, read_BTD)


@final
class RecurrentDecoder(Decoder):
    """Decodes with the recurrent state of each layer."""

    def __init__(self, model: Eigenstate, max_tokens: int | None) -> None:
        super().__init__(max_tokens)
        self._model = model
        self._states = [[MemoryState() for _ in model.config.scales] for _ in model.blocks]

    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits after these tokens, computed from them and the states before them.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """
        end = self.num_tokens + tokens_BT.shape[1]
        hidden_BTD = self._model.embed(tokens_BT, [(self.num_tokens, end)])
        for block, states in zip(self._model.blocks, self._states, strict=True):
            hidden_BTD = block.decode(hidden_BTD, states, self.num_tokens)  # type: ignore[operator]
        return self._model.last_logits(hidden_BTD)


@dataclass
class MemoryState:
    """The state of one memory between two pieces of a document."""

    last: Tensor | None = None
    """The last state (B, E). None before the first."""
    pending: Tensor | None = None
    """Drive (B, T, E) of the tokens that do not yet fill a group of `scale`."""


class Recurrence(nn.Module):
    """Drive, eigenstates, resonance, and back to the model's width through a gate."""

    def __init__(self, config: EigenstateConfig, ops: Ops) -> None:
        super().__init__()
        width, count, bias = config.d_model, config.num_eigenstates, config.bias
        self.ops = ops
        self.drive = Factor(width, 2 * count, bias=bias, ops=ops)
        self.gate = Linear(width, width, bias=True, ops=ops)
        self.output = Factor(2 * count, width, bias=bias, ops=ops)
        self.selection = (
            Linear(width, count, bias=True, ops=ops) if config.eigenvalues == "selective" else None
        )
        self.memories = nn.ModuleList(Memory(config, scale, ops) for scale in config.scales)
        self.share = nn.Parameter(torch.zeros(len(config.scales))) if config.scales[1:] else None
        self.coupling = nn.Parameter(torch.zeros(count, count // config.num_heads))

    def forward(
        self,
        hidden_BTD: Tensor,
        doc_ids_BT: Tensor | None = None,
        context: Context | None = None,
        carried: list[MemoryState] | None = None,
        start: int = 0,
    ) -> Tensor:
        """Return the output for each token, computed from the tokens up to it.

        With `carried` the tokens continue a document at the position `start`, and it is updated.
        The pace of a selective recurrence multiplies its decay rate by a factor from 0 to 2.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        pace_BTK = None
        if self.selection is not None:
            pace_BTK = 2 * at_least_fp32(self.selection(hidden_BTD)).sigmoid()
        memories: list[Memory] = [*self.memories]
        eigenvalues = [memory.eigenvalues(pace_BTK) for memory in memories]
        drive_BTE = self.drive(hidden_BTD)
        if carried is None:
            states = [
                memory(drive_BTE, own, doc_ids_BT, context)
                for memory, own in zip(memories, eigenvalues, strict=True)
            ]
        else:
            states = [
                memory.decode(drive_BTE, own, state, start)
                for memory, own, state in zip(memories, eigenvalues, carried, strict=True)
            ]
        states_BTE = states[0]
        if self.share is not None:
            share_N111 = local(self.share).softmax(dim=0)[:, None, None, None]
            states_BTE = (torch.stack(states) * share_N111).sum(dim=0)
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


class Memory(nn.Module):
    """Eigenstates that are driven by the means of every `scale` tokens."""

    def __init__(self, config: EigenstateConfig, scale: int, ops: Ops) -> None:
        super().__init__()
        self.config = config
        self.scale = scale
        self.ops = ops
        self.first = 0
        """The first eigenstate of this rank."""
        self.log_rate = nn.Parameter(torch.zeros(config.num_eigenstates))
        """Logarithm of the decay rate per step: |eigenvalue| = exp(-exp(log_rate)), below 1 for any
        learned value.
        """
        self.detuning = nn.Parameter(torch.zeros(config.num_eigenstates))
        """Angle relative to the eigenstate's initial angle, in units of the decay rate: see
        `eigenvalues`.
        """

    @torch.no_grad()
    def init_eigenvalues(self) -> None:
        """Draw time constants: log-uniformly up to `model.memory` tokens, or the published ones."""
        if self.config.initialisation == "published":
            magnitude = torch.empty_like(self.log_rate).uniform_(-3, 0).sigmoid_()
            self.log_rate.copy_(magnitude.log_().neg_().log_())
        else:
            longest = max((self.config.memory or 2) / self.scale, 2.0)
            self.log_rate.uniform_(-math.log(longest), 0.0)
        self.detuning.zero_()

    def forward(
        self,
        drive_BTE: Tensor,
        eigenvalues: tuple[Tensor, Tensor],
        doc_ids_BT: Tensor | None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the latest state that each token may read.

        With a context, the tokens are this rank's, whole groups of `scale`.

        Shapes:  drive_BTE (B, T, E); eigenvalues as `eigenvalues` returns them; doc_ids_BT (B, T)
                 integers.
        Returns: states_BTE, in the dtype of `ops.scan`.
        """
        tokens = drive_BTE.shape[1]
        if self.scale == 1 or doc_ids_BT is None:
            drive_BNE = _scaled(self._means(drive_BTE), eigenvalues)
            if context is None:
                states_BNE = self._states(drive_BNE, eigenvalues, doc_ids_BT, None)
                return self._by_token(states_BNE, None, 0, tokens)
            own_BN = None if doc_ids_BT is None else context.own(doc_ids_BT)
            states_BNE = self._states(drive_BNE, eigenvalues, own_BN, None)
            before_BE, added_BNE = context.carried(
                states_BNE[:, -1], *eigenvalues, states_BNE.shape[1], doc_ids_BT
            )
            return self._by_token(states_BNE + added_BNE, before_BE, 0, tokens)
        if tokens < self.scale:
            return at_least_fp32(torch.zeros_like(drive_BTE))
        groups = Groups.of(doc_ids_BT, self.scale)
        drive_BNE = _scaled(group_means(drive_BTE, self.scale, groups), eigenvalues)
        states_BNE = self._states(drive_BNE, eigenvalues, groups.document, None)
        return latest_states(states_BNE, self.scale, groups)

    def decode(
        self,
        drive_BTE: Tensor,
        eigenvalues: tuple[Tensor, Tensor],
        carried: MemoryState,
        start: int,
    ) -> Tensor:
        """Return the states for the next tokens of a document, and update `carried`.

        Shapes:  drive_BTE (B, T, E), at the positions from `start` on; eigenvalues as in `forward`.
        Returns: states_BTE, in at least fp32.
        """
        tokens = drive_BTE.shape[1]
        if carried.pending is not None:
            drive_BTE = torch.cat((carried.pending, drive_BTE), dim=1)
        drive_BNE = _scaled(at_least_fp32(self._means(drive_BTE)), eigenvalues)
        states_BNE = self._states(drive_BNE, eigenvalues, None, carried.last)
        states_BTE = self._by_token(states_BNE, carried.last, start, tokens)
        if self.scale > 1:
            carried.pending = drive_BTE[:, drive_BTE.shape[1] // self.scale * self.scale :]
        if states_BNE.shape[1]:
            carried.last = states_BNE[:, -1]
        return states_BTE

    def eigenvalues(self, pace_BTK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logarithms of magnitudes, and angles.

        The initial angles are spread over the whole circle. Learned angles are relative to them, in
        units of the decay rate. If angles were learned in radians, one optimizer step would rotate
        old states by whole circles. An angle near zero would accumulate what all tokens have in
        common, and drown what distinguishes them.

        Shapes:  pace_BTK (B, T, K), None is 1.
        Returns: (log_decay, angle), both (K,), or (B, T, K) with a pace.
        """
        rate_K = at_least_fp32(local(self.log_rate)).exp()
        index_K = torch.arange(1, len(rate_K) + 1, device=rate_K.device, dtype=torch.float64)
        if self.first:
            index_K += self.first
        initial_K = (2 * math.pi * (index_K * GOLDEN).frac()).to(rate_K.dtype)
        angle_K = initial_K + rate_K * local(self.detuning)
        if pace_BTK is None:
            return -rate_K, angle_K
        return -rate_K * pace_BTK, angle_K.expand_as(pace_BTK)

    def _means(self, drive_BTE: Tensor) -> Tensor:
        """Return the mean of every complete group of one document."""
        return drive_BTE if self.scale == 1 else group_means(drive_BTE, self.scale, None)

    def _states(
        self,
        drive_BNE: Tensor,
        eigenvalues: tuple[Tensor, Tensor],
        doc_ids_BN: Tensor | None,
        start_BE: Tensor | None,
    ) -> Tensor:
        if not drive_BNE.shape[1]:
            return at_least_fp32(drive_BNE)
        chunk_size = self.config.chunk_size
        if chunk_size == "auto":
            chunk_size = AUTO_CHUNK.get(drive_BNE.device.type, AUTO_CHUNK["cuda"])
        return self.ops.scan(
            *eigenvalues, drive_BNE, doc_ids_BT=doc_ids_BN, start_BE=start_BE, chunk_size=chunk_size
        )

    def _by_token(
        self, states_BNE: Tensor, before_BE: Tensor | None, start: int, tokens: int
    ) -> Tensor:
        """Return, for each token from `start` on, the state of the latest complete group.

        Before the first group it is `before_BE`, or zero.
        """
        if self.scale == 1:
            return states_BNE
        if before_BE is None:
            before_BE = states_BNE.new_zeros(states_BNE.shape[0], states_BNE.shape[2])
        known_BUE = repeated(torch.cat((before_BE[:, None], states_BNE), dim=1), self.scale)
        return known_BUE[:, start % self.scale + 1 :][:, :tokens]


def _scaled(drive_BNE: Tensor, eigenvalues: tuple[Tensor, Tensor]) -> Tensor:
    """Return the drive times a gain for which states keep the variance of the drive."""
    gain = (-torch.expm1(2 * eigenvalues[0])).sqrt()
    return drive_BNE * torch.cat((gain, gain), dim=-1)


@dataclass(frozen=True)
class Groups:
    """The positions of the groups of packed documents, for a recurrence with coarser steps.

    A group is `scale` (S) tokens. Groups start again at every document. Leftover tokens at the end
    of a document form no group. A group is available from its last token on.

    A row has room for T // S groups and is filled from the left: no shape depends on the documents.
    """

    row: Tensor
    """The index of each row (B, 1)."""
    members: Tensor
    """The tokens of each group (B, N, S). Arbitrary tokens where there is no group."""
    document: Tensor
    """The document of each group (B, N), counted from 1 in its row. 0 where there is no group."""
    known: Tensor
    """The latest complete group at each token, times S, plus the tokens since (B, T). All tokens
    of a row get different numbers.
    """
    is_known: Tensor
    """Whether there is such a group in the token's own document (B, T)."""

    @classmethod
    def of(cls, doc_ids_BT: Tensor, scale: int) -> Self:
        """Return the groups of `scale` tokens.

        Shapes:  doc_ids_BT (B, T) integers, T >= scale.
        """
        rows, tokens = doc_ids_BT.shape
        device = doc_ids_BT.device
        index_T = torch.arange(tokens, device=device)
        row_B1 = torch.arange(rows, device=device)[:, None]
        starts_BT = functional.pad(doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1], (1, 0), value=True)
        read_BT = index_T - torch.where(starts_BT, index_T, 0).cummax(dim=1).values + 1
        complete_BT = (read_BT % scale == 0).cumsum(dim=1)
        wanted_BN = torch.arange(1, tokens // scale + 1, device=device).repeat(rows, 1)
        last_BN = torch.searchsorted(complete_BT, wanted_BN)
        exists_BN, last_BN = last_BN < tokens, last_BN.clamp(max=tokens - 1)
        return cls(
            row=row_B1,
            members=last_BN[..., None] + torch.arange(1 - scale, 1, device=device),
            document=torch.where(exists_BN, starts_BT.cumsum(dim=1)[row_B1, last_BN], 0),
            known=(complete_BT - 1).clamp(min=0) * scale + read_BT % scale,
            is_known=read_BT >= scale,
        )


def group_means(drive_BTE: Tensor, scale: int, groups: Groups | None) -> Tensor:
    """Return the mean of every group, in at least fp32, and zero for groups that do not exist.

    Shapes:  drive_BTE (B, T, E); groups None where a row is one document, whose groups are
             contiguous from its first token on.
    Returns: means_BNE, N = T // scale.
    """
    drive_BTE = at_least_fp32(drive_BTE)
    if groups is None:
        complete = drive_BTE.shape[1] // scale * scale
        return torch.unflatten(drive_BTE[:, :complete], 1, (-1, scale)).mean(dim=2)
    members_BNSE = drive_BTE[groups.row[..., None], groups.members]
    return torch.where((groups.document > 0)[..., None], members_BNSE.mean(dim=2), 0.0)


def latest_states(states_BNE: Tensor, scale: int, groups: Groups) -> Tensor:
    """Return, for each token, the state of the latest complete group of its document, or zero.

    Shapes:  states_BNE (B, N, E).
    Returns: known_BTE.
    """
    known_BTE = repeated(states_BNE, scale)[groups.row, groups.known]
    return torch.where(groups.is_known[..., None], known_BTE, 0.0)


def repeated(states_BNE: Tensor, scale: int) -> Tensor:
    """Return every state `scale` times in a row.

    Its backward pass sums in a fixed order, unlike that of indexing with repeated indices.

    Shapes:  states_BNE (B, N, E).
    Returns: (B, N * scale, E).
    """
    return states_BNE[:, :, None].expand(-1, -1, scale, -1).flatten(1, 2)


USES = ("linear", "scan")
MODEL = Eigenstate
