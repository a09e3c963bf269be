"""Temporal eigenstate network: a diagonal linear recurrence instead of attention.

Its work grows linearly with the tokens, and its memory of a document has a constant size.

Letters: B rows, T tokens, D width, V vocabulary, L layers, K eigenstates, H heads of resonance, F
         width inside the MLP.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, Self, final

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from flatout.errors import ConfigError
from flatout.json_io import JsonObject
from flatout.models import layers
from flatout.models.language_model import Decoder, EmbeddingModel, Flops, LanguageModelConfig
from flatout.models.recurrence import Memory, MemoryState, Recurrence
from flatout.ops import Ops

INIT_STD = 0.02
"""Standard deviation of initial weights."""
GATE_BIAS = -2.0
"""An initial gate passes an eighth, so that each block changes little at first."""
LEAN_CHUNK = 64
"""Tokens per chunk at which the matrices of powers are small compared with the states."""
UNLIMITED = 2**40
"""Longer than any sequence."""


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
    """Tokens that the fast recurrence processes at once; auto is 32 on a CPU and 128 on a GPU. The
    value does not change results.
    """
    eigenvalues: Literal["fixed", "selective"] = "fixed"
    """fixed (learned, the same for all tokens) or selective (the token determines how fast an
    eigenstate decays).
    """
    scales: tuple[int, ...] = (1,)
    """Tokens averaged per step, one number for each of several parallel recurrences; [1, 2, 4, 8]
    is the hierarchical form.
    """
    initialisation: Literal["long-memory", "published"] = "long-memory"
    """long-memory (time constants log-uniform up to `memory` tokens) or published (eigenvalues of
    at most one half: a memory of 7 tokens).
    """
    memory: int | None = Field(None, ge=2)
    """Longest initial time constant, in tokens; None means data.seq_len."""
    d_ff: int | None = Field(None, ge=1)
    """Width inside the MLP (F); None means 4 d_model."""
    bias: bool = False
    """Biases in the linear layers and the norms; the gate always has one."""
    positions: Literal["none", "learned"] = "none"
    """none (the recurrence knows the order) or learned (a vector per position, added to the
    embedding, which limits the sequence length).
    """
    max_seq_len: int | None = Field(None, ge=1)
    """Learned positions of the model; sequences and prompts may be shorter. None means
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
            divisors = [
                n for n in range(1, self.num_eigenstates + 1) if self.num_eigenstates % n == 0
            ]
            nearest = min(divisors, key=lambda count: abs(count - self.num_heads))
            raise ConfigError(
                f"model.num_eigenstates={self.num_eigenstates} is not divisible by "
                f"model.num_heads={self.num_heads}.",
                fix=f"Set model.num_heads={nearest}.",
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
                fix="Leave it out, or set model.positions=learned.",
            )
        return self


class Eigenstate(EmbeddingModel):
    """Pre-norm blocks of a gated recurrence and an MLP."""

    draws_everything: ClassVar[bool] = True
    Config: ClassVar[type[LanguageModelConfig]] = EigenstateConfig
    config: EigenstateConfig

    def __init__(self, config: EigenstateConfig, ops: Ops) -> None:
        super().__init__(config, ops)
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

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the model accepts; without learned positions, any length."""
        return self.config.max_seq_len or UNLIMITED

    def decoder(self, max_tokens: int | None = None) -> Decoder:
        """Return a decoder that keeps the state of each layer, in constant memory.

        Without learned positions its length is unlimited.

        Memory: 2 L B K fp32 numbers for each of `model.scales`, and the drive of as many tokens as
                the largest of them.
        """
        is_limited = self.position_embedding is not None
        return RecurrentDecoder(self, self.token_limit(max_tokens) if is_limited else None)

    def embed(self, tokens_BT: Tensor, start: int = 0) -> Tensor:
        """Return the embedding of each token, plus that of its position when positions are learned.

        The first position is `start`.

        Shapes:  tokens_BT (B, T) integers.
        Returns: hidden_BTD.
        Raises:  ShapeError when there is no position for a token.
        """
        hidden_BTD = self.token_embedding(tokens_BT)
        if self.position_embedding is not None:
            end = start + tokens_BT.shape[1]
            layers.check_length(end, self.max_seq_len)
            hidden_BTD = hidden_BTD + self.position_embedding.weight[start:end]
        return layers.dropped(hidden_BTD, self.config.dropout, self.training)

    def init_weights(self) -> None:
        """Initialise every parameter.

        Matrices are normal(0, 0.02), biases 0, norms 1, gate biases -2, and eigenvalues follow
        `model.initialisation`. The two matrices of a block that add to the hidden states get 0.02 /
        sqrt(2 L), as in GPT-2; the drive's, which follows a norm, gets 1 / sqrt(D): a drive of unit
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
                module.init_eigenvalues(self.config.initialisation, self.config.memory)

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the training FLOPs per token, which do not depend on the sequence length.

        The coupling multiplies both real and imaginary parts, so it counts twice. The recurrence
        itself is not a matrix product and does not count.
        """
        couplings = (p.numel() for name, p in self.named_parameters() if name.endswith("coupling"))
        total = self.matmul_flops() + 6 * sum(couplings)
        return Flops(palm=total, causal_exact=Fraction(total))

    def stacked_by_ending(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of the real and imaginary drive, and of each head's coupling."""
        count, heads = self.config.num_eigenstates, self.config.num_heads
        return {"drive.weight": (count, count), "coupling": (count // heads,) * heads}


class Block(layers.ResidualBlock):
    """A gated recurrence and an MLP; each reads normalised hidden states and adds to them."""

    def __init__(self, config: EigenstateConfig, ops: Ops) -> None:
        super().__init__()
        width, bias = config.d_model, config.bias
        self.recurrence_norm = layers.LayerNorm(width, bias=bias)
        self.recurrence = Recurrence(
            width=width,
            num_eigenstates=config.num_eigenstates,
            num_heads=config.num_heads,
            scales=config.scales,
            eigenvalues=config.eigenvalues,
            chunk_size=config.chunk_size,
            bias=bias,
            ops=ops,
        )
        self.mlp_norm = layers.LayerNorm(width, bias=bias)
        self.mlp = layers.MLP(
            width, config.mlp_width, activation=functional.silu, bias=bias, ops=ops
        )
        self.dropout = config.dropout

    def forward(self, hidden_BTD: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
        """Return the hidden states after this block.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        read_BTD = self.recurrence(self.recurrence_norm(hidden_BTD), doc_ids_BT)
        return self.added(hidden_BTD, read_BTD)

    def decode(self, hidden_BTD: Tensor, states: list[MemoryState], start: int) -> Tensor:
        """Return the hidden states of the next tokens of a document, and update the states.

        Shapes:  hidden_BTD (B, T, D), at the positions from `start` on.
        Returns: hidden_BTD.
        """
        read_BTD = self.recurrence.decode(self.recurrence_norm(hidden_BTD), states, start)
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
        hidden_BTD = self._model.embed(tokens_BT, self.num_tokens)
        for block, states in zip(self._model.blocks, self._states, strict=True):
            hidden_BTD = block.decode(hidden_BTD, states, self.num_tokens)  # type: ignore[operator]
        return self._model.last_logits(hidden_BTD)


USES = ("linear", "scan")
MODEL = Eigenstate
