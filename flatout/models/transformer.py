"""Decoder-only transformer, configurable from GPT-2 to Llama.

Letters: B rows, T tokens, D width, V vocabulary, L layers, H query heads, G key and value heads, C
         head size, F width inside the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import ClassVar, Literal, Self, final

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from flatout.errors import ConfigError
from flatout.models import layers
from flatout.models.decoding import Decoder, KeyValueCache
from flatout.models.embedding_model import EmbeddingModel
from flatout.models.language_model import Flops, LanguageModelConfig
from flatout.models.rotary import Rotary, linear, llama3, unscaled
from flatout.ops import Ops
from flatout.ops.attention import block_masks

INIT_STD = 0.02
"""Standard deviation of initial weights (GPT-2: Radford et al. 2019)."""
GATED: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": functional.silu, "geglu": layers.gelu}
"""Activations of the gate in a gated MLP."""
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": layers.gelu,
    "gelu_exact": functional.gelu,
    "relu2": layers.relu2,
}
"""Activations of an MLP without a gate."""


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
    """Width inside the MLP (F); None means 4 d_model, or for swiglu and geglu 8/3 d_model rounded
    up to a multiple of 64.
    """
    max_seq_len: int | None = Field(None, ge=1)
    """Positions of the model; sequences and prompts may be shorter. None means data.seq_len."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """layernorm or rmsnorm, before attention, before the MLP and after the last block."""
    parallel_residual: bool = False
    """Attention and MLP of a block read the same hidden states, as in GPT-NeoX; false means that
    the MLP reads the sum with attention's output.
    """
    positions: Literal["learned", "rotary"] = "rotary"
    """learned (a vector per position, added to the embedding) or rotary (queries and keys are
    rotated).
    """
    activation: Literal["gelu", "gelu_exact", "swiglu", "geglu", "relu2"] = "gelu"
    """gelu (tanh formula), gelu_exact (by the error function), swiglu (gated SiLU), geglu (gated
    GELU, tanh formula) or relu2 (squared ReLU).
    """
    bias: bool = False
    """Biases in the linear layers and the norms."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values; None means as `bias`."""
    tied_head: bool = True
    """Use the embedding as the output weight too."""
    rotary_base: float = Field(10_000.0, gt=1)
    """The longest rotary wavelength is about 2 pi times this many tokens."""
    rotary_dims: int | None = Field(None, ge=2)
    """Components of each head that are rotated, an even number; None means all."""
    rotary_scaling: Literal["none", "linear", "llama3"] = "none"
    """How rotary wavelengths are stretched for longer sequences: none, linear (all of them) or
    llama3 (the long ones).
    """
    rotary_factor: float = Field(1.0, ge=1)
    """Factor of the stretched wavelengths."""
    rotary_low_factor: float = Field(1.0, gt=0)
    """For llama3: wavelengths above rotary_original_len / rotary_low_factor are stretched."""
    rotary_high_factor: float = Field(4.0, gt=0)
    """For llama3: wavelengths below rotary_original_len / rotary_high_factor are not stretched."""
    rotary_original_len: int = Field(8192, ge=1)
    """For llama3: tokens of the sequences before the stretching."""
    post_norm: bool = False
    """Norms also after attention and after the MLP, before their output is added."""
    qk_norm: bool = False
    """Apply RMSNorm to each query and key head, before rotary positions."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in every RMSNorm, including those of queries and keys; many Llama
    checkpoints use 1e-6.
    """
    layer_norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in every LayerNorm."""
    embedding_scale: float = Field(1.0, gt=0)
    """Factor of the token embedding; Gemma's is the square root of d_model."""
    logit_scale: float = Field(1.0, gt=0)
    """Factor of the logits, before model.logit_softcap."""
    window: int | None = Field(None, ge=1)
    """Keys that a query sees, its own included; None means all up to its own."""
    full_attention_every: int | None = Field(None, ge=2)
    """Every n-th layer sees all keys, whatever `window`; None means that it holds for every
    layer.
    """
    attention_softcap: float | None = Field(None, gt=0)
    """Limit the scores of attention to plus or minus this value with a tanh; None means no
    limit.
    """
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
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer, counted from 0."""
        sees_all = self.full_attention_every and (layer + 1) % self.full_attention_every == 0
        return None if sees_all else self.window

    @property
    def num_positions(self) -> int:
        """Positions of the model; 1,024 if they were never set."""
        return self.max_seq_len or 1024

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP, F."""
        gated = math.ceil(8 * self.d_model / 3 / 64) * 64
        return self.d_ff or (gated if self.activation in GATED else 4 * self.d_model)

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
        if self.rotary_dims and (self.rotary_dims % 2 or self.rotary_dims > self.head_size):
            raise ConfigError(
                f"model.rotary_dims={self.rotary_dims} must be even and at most the head size, "
                f"{self.head_size}.",
                fix=f"Set model.rotary_dims={max(self.head_size // 4 * 2, 2)}, or leave it out.",
            )
        if self.full_attention_every and self.window is None:
            raise ConfigError(
                f"model.full_attention_every={self.full_attention_every} has no effect without "
                "model.window: every layer sees all tokens.",
                fix="Set model.window, or leave it out.",
            )
        if self.rotary_low_factor >= self.rotary_high_factor:
            raise ConfigError(
                f"model.rotary_low_factor={self.rotary_low_factor:g} must be below "
                f"model.rotary_high_factor={self.rotary_high_factor:g}.",
                fix="Set them to 1 and 4, as in Llama 3.",
            )
        return self


class Transformer(EmbeddingModel):
    """Pre-norm decoder-only transformer."""

    Config: ClassVar[type[LanguageModelConfig]] = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig, ops: Ops) -> None:
        super().__init__(config, ops)
        width = config.d_model
        rotary = _rotary(config) if config.positions == "rotary" else None
        self.logit_scale = config.logit_scale
        self.token_embedding = layers.Embedding(config.vocab_size, width)
        self.position_embedding = (
            layers.Embedding(config.num_positions, width) if config.positions == "learned" else None
        )
        self.blocks = nn.ModuleList(
            _block(config, layer, rotary, ops) for layer in range(config.num_layers)
        )
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
        layers.check_positions(config.max_seq_len, seq_len)
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
        if self.config.embedding_scale != 1:
            hidden_BTD = hidden_BTD * self.config.embedding_scale
        if self.position_embedding is not None:
            hidden_BTD = hidden_BTD + self.position_embedding.weight[start:end]
        return layers.dropped(hidden_BTD, self.config.dropout, self.training)

    def shared_by_blocks(self, tokens_BT: Tensor, doc_ids_BT: Tensor | None) -> tuple[object, ...]:
        """Return the masks of FlexAttention, if the attention in use needs them.

        Shapes:  tokens_BT, doc_ids_BT (B, T) integers.
        """
        windows = map(self.config.window_of, range(self.config.num_layers))
        masks = block_masks(self.ops.attention, tokens_BT, doc_ids_BT, windows)
        return (masks,) if masks else ()

    def init_weights(self) -> None:
        """Initialise every parameter: matrices normal(0, 0.02), biases 0, norms 1.

        The two matrices of a block that add to the hidden states get 0.02 / sqrt(2 L), so that the
        sum over the blocks does not grow with their number. Source: GPT-2 (Radford et al. 2019,
        section 2.3).
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.own_parameters():
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
        per_key = 12 * config.num_heads * config.head_size
        visible = 0
        for layer in range(config.num_layers):
            window = min(config.window_of(layer) or seq_len, seq_len)
            visible += window * (window + 1) // 2 + (seq_len - window) * window
        return Flops(
            palm=matmul + per_key * config.num_layers * seq_len,
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
        windows = map(model.config.window_of, range(len(model.blocks)))
        self._caches = [KeyValueCache(min(size or max_tokens, max_tokens)) for size in windows]

    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits after these tokens, computed from them and the cached keys and values.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """
        hidden_BTD = self._model.embed(tokens_BT, self.num_tokens)
        for block, cache in zip(self._model.blocks, self._caches, strict=True):
            hidden_BTD = block.decode(hidden_BTD, cache, self.num_tokens)  # type: ignore[operator]
        return self._model.last_logits(hidden_BTD)


def _rotary(config: TransformerConfig) -> Rotary:
    scaling: dict[str, Callable[[Tensor], Tensor]] = {
        "none": unscaled,
        "linear": partial(linear, factor=config.rotary_factor),
        "llama3": partial(
            llama3,
            factor=config.rotary_factor,
            low_factor=config.rotary_low_factor,
            high_factor=config.rotary_high_factor,
            original_len=config.rotary_original_len,
        ),
    }
    return Rotary(
        config.head_size,
        config.num_positions,
        config.rotary_base,
        num_rotated=config.rotary_dims,
        scaling=scaling[config.rotary_scaling],
    )


def _block(config: TransformerConfig, layer: int, rotary: Rotary | None, ops: Ops) -> layers.Block:
    attention = layers.Attention(
        width=config.d_model,
        num_heads=config.num_heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_size,
        bias=config.bias,
        qkv_bias=config.has_qkv_bias,
        window=config.window_of(layer),
        softcap=config.attention_softcap,
        rotary=rotary,
        qk_norm=config.qk_norm,
        rms_norm_eps=config.rms_norm_eps,
        post_norm=_norm(config) if config.post_norm else None,
        ops=ops,
    )
    is_gated = config.activation in GATED
    mlp = (layers.GatedMLP if is_gated else layers.MLP)(
        config.d_model,
        config.mlp_width,
        activation=(GATED if is_gated else PLAIN)[config.activation],
        bias=config.bias,
        post_norm=_norm(config) if config.post_norm else None,
        ops=ops,
    )
    return layers.Block(
        norm=partial(_norm, config),
        attention=attention,
        mlp=mlp,
        dropout=config.dropout,
        is_parallel=config.parallel_residual,
    )


def _norm(config: TransformerConfig) -> nn.Module:
    if config.norm == "layernorm":
        return layers.LayerNorm(config.d_model, bias=config.bias, eps=config.layer_norm_eps)
    return layers.RMSNorm(config.d_model, eps=config.rms_norm_eps)


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), -divisor))


USES = ("linear", "attention", "heads")
MODEL = Transformer
