"""Decoder-only transformer, configurable from GPT-2 to Llama.

Letters: B rows, T tokens, D width, V vocabulary, L layers, H query heads, G key and value heads, C
         head size, F width inside the MLP.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import ClassVar, Literal, Self, final

from pydantic import Field, model_validator
from torch import Tensor, nn

from flatout.errors import ConfigError
from flatout.models import layers
from flatout.models.decoding import Decoder, KeyValueCache
from flatout.models.embedding_model import EmbeddingModel
from flatout.models.language_model import Flops, LanguageModelConfig
from flatout.ops import Ops

INIT_STD = 0.02
"""Standard deviation of initial weights (GPT-2: Radford et al. 2019)."""


class TransformerConfig(LanguageModelConfig):
    """The shape of a transformer; GPT-2 and Llama differ in the five keys from `norm` on."""

    num_layers: int = Field(6, ge=1)
    """Blocks, each with one attention and one MLP (L)."""
    d_model: int = Field(384, ge=1)
    """Width of the hidden states (D)."""
    num_heads: int = Field(6, ge=1)
    """Query heads (H)."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key and value heads (G), a divisor of num_heads; None means one per query head."""
    head_dim: int | None = Field(None, ge=1)
    """Size of a head (C); None means d_model / num_heads."""
    d_ff: int | None = Field(None, ge=1)
    """Width inside the MLP (F); None means 4 d_model, or for swiglu 8/3 d_model rounded up to a
    multiple of 64.
    """
    max_seq_len: int | None = Field(None, ge=1)
    """Positions of the model; sequences and prompts may be shorter. None means data.seq_len."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """layernorm or rmsnorm, before attention, before the MLP and after the last block."""
    positions: Literal["learned", "rotary"] = "rotary"
    """learned (a vector per position, added to the embedding) or rotary (queries and keys are
    rotated).
    """
    activation: Literal["gelu", "swiglu", "relu2"] = "gelu"
    """gelu (tanh formula), swiglu (gated SiLU) or relu2 (squared ReLU)."""
    bias: bool = False
    """Biases in the linear layers and the norms."""
    tied_head: bool = True
    """Use the embedding as the output weight too."""
    rotary_base: float = Field(10_000.0, gt=1)
    """The longest rotary wavelength is about 2 pi times this many tokens."""
    qk_norm: bool = False
    """Apply RMSNorm to each query and key head, before rotary positions."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in every RMSNorm, including those of queries and keys; many Llama
    checkpoints use 1e-6.
    """
    window: int | None = Field(None, ge=1)
    """Keys that a query sees, its own included; None means all up to its own."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of components dropped from the embedding and from the output of each attention and
    MLP.
    """

    @property
    def head_size(self) -> int:
        """Size of a head, C."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads, G."""
        return self.num_kv_heads or self.num_heads

    @property
    def num_positions(self) -> int:
        """Positions of the model; 1,024 if they were never set."""
        return self.max_seq_len or 1024

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP, F."""
        gated = math.ceil(8 * self.d_model / 3 / 64) * 64
        return self.d_ff or (gated if self.activation == "swiglu" else 4 * self.d_model)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.head_dim is None and self.d_model % self.num_heads:
            divisor = _nearest_divisor(self.d_model, self.num_heads)
            raise ConfigError(
                f"model.d_model={self.d_model} is not divisible by "
                f"model.num_heads={self.num_heads}.",
                fix=f"Set model.num_heads={divisor}, or set model.head_dim.",
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} is not divisible by "
                f"model.num_kv_heads={self.kv_heads}.",
                fix=f"Set model.num_kv_heads={_nearest_divisor(self.num_heads, self.kv_heads)}.",
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ConfigError(
                f"Rotary positions need an even head size, but it is {self.head_size}.",
                fix=f"Set model.head_dim={self.head_size + 1}, or model.positions=learned.",
            )
        return self


class Transformer(EmbeddingModel):
    """Pre-norm decoder-only transformer."""

    Config: ClassVar[type[LanguageModelConfig]] = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig, ops: Ops) -> None:
        super().__init__(config, ops)
        width = config.d_model
        rotary = (
            layers.Rotary(config.head_size, config.num_positions, config.rotary_base)
            if config.positions == "rotary"
            else None
        )
        self.token_embedding = layers.Embedding(config.vocab_size, width)
        self.position_embedding = (
            layers.Embedding(config.num_positions, width) if config.positions == "learned" else None
        )
        self.blocks = nn.ModuleList(_block(config, rotary, ops) for _ in range(config.num_layers))
        self.final_norm = _norm(config)
        self.unembedding = self.new_unembedding(tied=config.tied_head)
        self.init_weights()

    @classmethod
    def fitted(cls, config: TransformerConfig, seq_len: int) -> TransformerConfig:
        """Return the configuration with `seq_len` positions, unless it sets max_seq_len.

        Raises: ConfigError when max_seq_len is below `seq_len`.
        """
        if config.max_seq_len is None:
            return config.model_copy(update={"max_seq_len": seq_len})
        if seq_len > config.max_seq_len:
            raise ConfigError(
                f"data.seq_len={seq_len} exceeds the model's {config.max_seq_len} positions "
                f"(model.max_seq_len={config.max_seq_len}).",
                fix=f"Set model.max_seq_len={seq_len}, or data.seq_len={config.max_seq_len}.",
            )
        return config

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the model accepts."""
        return self.config.num_positions

    def decoder(self, max_tokens: int | None = None) -> Decoder:
        """Return a decoder that caches the keys and values of each layer, within its window if any.

        Memory: 2 L B G C elements per token, for at most `max_tokens` or model.window tokens;
                allocated at the first read.
        """
        return CachingDecoder(self, self.token_limit(max_tokens))

    def embed(self, tokens_BT: Tensor, start: int = 0) -> Tensor:
        """Return the embedding of each token, plus that of its position when positions are learned.

        The first position is `start`.

        Shapes:  tokens_BT (B, T) integers.
        Returns: hidden_BTD.
        Raises:  ShapeError when a position is not below model.max_seq_len.
        """
        end = start + tokens_BT.shape[1]
        layers.check_length(end, self.max_seq_len)
        hidden_BTD = self.token_embedding(tokens_BT)
        if self.position_embedding is not None:
            hidden_BTD = hidden_BTD + self.position_embedding.weight[start:end]
        return layers.dropped(hidden_BTD, self.config.dropout, self.training)

    def init_weights(self) -> None:
        """Initialise every parameter: matrices normal(0, 0.02), biases 0, norms 1.

        The two matrices of a block that add to the hidden states get 0.02 / sqrt(2 L), so that the
        sum over the blocks does not grow with their number. Source: GPT-2 (Radford et al. 2019,
        section 2.3).
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                is_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else INIT_STD)

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the training FLOPs per token in sequences of `seq_len`.

        Besides `matmul_flops`, scores and values cost 4 H C per visible key forward, 12 H C in
        training. The input gradient of the first layer counts in full, since the embedding below it
        is trained; so do the products of the loss with the output weight.
        """
        config, matmul = self.config, self.matmul_flops()
        per_key = 12 * config.num_layers * config.num_heads * config.head_size
        window = min(config.window or seq_len, seq_len)
        visible = window * (window + 1) // 2 + (seq_len - window) * window
        return Flops(
            palm=matmul + per_key * seq_len,
            causal_exact=matmul + Fraction(per_key * visible, seq_len),
        )

    def stacked_by_ending(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of query, key and value in `qkv`, and of gate and value in `gate_up`."""
        config = self.config
        heads = (config.num_heads, config.kv_heads, config.kv_heads)
        return {
            "attention.qkv.weight": tuple(count * config.head_size for count in heads),
            "mlp.gate_up.weight": (config.mlp_width, config.mlp_width),
        }


@final
class CachingDecoder(Decoder):
    """Decodes with a cache of keys and values per layer."""

    def __init__(self, model: Transformer, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._model = model
        size = min(model.config.window or max_tokens, max_tokens)
        self._caches = [KeyValueCache(size) for _ in model.blocks]

    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits after these tokens, computed from them and the cached keys and values.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """
        hidden_BTD = self._model.embed(tokens_BT, self.num_tokens)
        for block, cache in zip(self._model.blocks, self._caches, strict=True):
            hidden_BTD = block.decode(hidden_BTD, cache, self.num_tokens)  # type: ignore[operator]
        return self._model.last_logits(hidden_BTD)


def _block(config: TransformerConfig, rotary: layers.Rotary | None, ops: Ops) -> layers.Block:
    attention = layers.Attention(
        width=config.d_model,
        num_heads=config.num_heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_size,
        bias=config.bias,
        window=config.window,
        rotary=rotary,
        qk_norm=config.qk_norm,
        rms_norm_eps=config.rms_norm_eps,
        ops=ops,
    )
    mlp: nn.Module
    if config.activation == "swiglu":
        mlp = layers.SwiGLU(config.d_model, config.mlp_width, bias=config.bias, ops=ops)
    else:
        activation = {"gelu": layers.gelu, "relu2": layers.relu2}[config.activation]
        mlp = layers.MLP(
            config.d_model, config.mlp_width, activation=activation, bias=config.bias, ops=ops
        )
    return layers.Block(
        norm=partial(_norm, config), attention=attention, mlp=mlp, dropout=config.dropout
    )


def _norm(config: TransformerConfig) -> nn.Module:
    if config.norm == "layernorm":
        return layers.LayerNorm(config.d_model, bias=config.bias)
    return layers.RMSNorm(config.d_model, eps=config.rms_norm_eps)


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), -divisor))


USES = ("linear", "attention", "heads")
MODEL = Transformer
