"""Decoder-only transformer, configurable from GPT-2 to Llama.

Letters: B rows, T tokens, D width, V vocabulary, L layers, H query heads, G key and value heads, C
         head size, F width inside the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self, final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from flatout.distributed.context import Context
from flatout.distributed.tensor import Cut, Split, local
from flatout.models import layers
from flatout.models.language_model import Decoder, EmbeddingModel, Flops, LanguageModelConfig
from flatout.ops import Ops, float64_device, product_dtype
from flatout.ops.attention import Mask, masks
from flatout.ops.linear import narrowed

GATED: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": functional.silu, "geglu": layers.gelu}
"""Activations of the gate in a gated MLP."""
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": layers.gelu,
    "gelu_exact": functional.gelu,
    "relu2": layers.relu2,
}
"""Activations of an MLP without a gate."""


class TransformerConfig(LanguageModelConfig):
    """The shape of a transformer. GPT-2 and Llama differ in the five keys from `norm` on."""

    rules = (
        (
            lambda shape: (
                shape.head_dim is None
                and shape.d_model % shape.num_heads
                and layers.nearest_divisor(shape.d_model, shape.num_heads)
            ),
            "model.d_model={0.d_model} is not divisible by model.num_heads={0.num_heads}.",
            "Set model.num_heads={1}, or set model.head_dim.",
        ),
        (
            lambda shape: (
                shape.num_heads % shape.kv_heads
                and layers.nearest_divisor(shape.num_heads, shape.kv_heads)
            ),
            "model.num_heads={0.num_heads} is not divisible by model.num_kv_heads={0.kv_heads}.",
            "Set model.num_kv_heads={1}.",
        ),
        (
            lambda shape: (
                shape.positions == "rotary" and shape.head_size % 2 and shape.head_size + 1
            ),
            "Rotary positions need an even head size, but it is {0.head_size}.",
            "Set model.head_dim={1}, or model.positions=learned.",
        ),
        (
            lambda shape: (
                shape.rotary_dims
                and (shape.rotary_dims % 2 or shape.rotary_dims > shape.head_size)
                and max(shape.head_size // 4 * 2, 2)
            ),
            "model.rotary_dims={0.rotary_dims} must be even and at most the head size, "
            "{0.head_size}.",
            "Set model.rotary_dims={1}, or remove it.",
        ),
        (
            lambda shape: shape.full_attention_every and shape.window is None,
            "model.full_attention_every={0.full_attention_every} has no effect without "
            "model.window: every layer sees all tokens.",
            "Set model.window, or remove it.",
        ),
        (
            lambda shape: shape.rotary_low_factor >= shape.rotary_high_factor,
            "model.rotary_low_factor={0.rotary_low_factor:g} must be below "
            "model.rotary_high_factor={0.rotary_high_factor:g}.",
            "Set them to 1 and 4, as in Llama 3.",
        ),
        (
            lambda shape: (
                shape.rotary_scaling != "none" and "rotary_factor" not in shape.model_fields_set
            ),
            "model.rotary_scaling={0.rotary_scaling} has no effect without model.rotary_factor.",
            "Set model.rotary_factor=4 for sequences four times as long, or remove it.",
        ),
    )
    used_with: ClassVar[Mapping[str, str]] = {
        "rms_norm_eps": "norm=rmsnorm qk_norm=true",
        "layer_norm_eps": "norm=layernorm",
        "rotary_base": "positions=rotary",
        "rotary_dims": "positions=rotary",
        "rotary_scaling": "positions=rotary",
        "rotary_factor": "rotary_scaling=linear rotary_scaling=llama3",
        "rotary_low_factor": "rotary_scaling=llama3",
        "rotary_high_factor": "rotary_scaling=llama3",
        "rotary_original_len": "rotary_scaling=llama3",
    }

    num_layers: int = Field(6, ge=1)
    """Blocks, each with one attention and one MLP (L)."""
    d_model: int = Field(384, ge=1)
    """Width of the hidden states (D)."""
    num_heads: int = Field(6, ge=1)
    """Query heads (H)."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key and value heads (G), a divisor of num_heads. None means one per query head."""
    head_dim: int | None = Field(None, ge=1)
    """Size of a head (C). None means d_model / num_heads."""
    d_ff: int | None = Field(None, ge=1)
    """Width inside the MLP (F). None means 4 d_model, or for swiglu and geglu 8/3 d_model rounded
    up to a multiple of 64.
    """
    max_seq_len: int | None = Field(None, ge=1)
    """Positions of the model. Sequences and prompts may be shorter. None means data.seq_len."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """layernorm or rmsnorm, before attention, before the MLP and after the last block."""
    parallel_residual: bool = False
    """Attention and MLP of a block read the same hidden states, as in GPT-NeoX. False means that
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
    """Biases of queries, keys and values. None means as `bias`."""
    tied_head: bool = True
    """Use the embedding as the output weight too."""
    rotary_base: float = Field(10_000.0, gt=1)
    """The longest rotary wavelength is about 2 pi times this many tokens."""
    rotary_dims: int | None = Field(None, ge=2)
    """Components of each head that are rotated, an even number. None means all."""
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
    qk_norm: bool = False
    """Apply RMSNorm to each query and key head, before rotary positions."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in every RMSNorm, including those of queries and keys. Many Llama
    checkpoints use 1e-6.
    """
    layer_norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in every LayerNorm."""
    logit_scale: float = Field(1.0, gt=0)
    """Factor of the logits, before model.logit_softcap."""
    window: int | None = Field(None, ge=1)
    """Keys that a query sees, its own included. None means all up to its own."""
    full_attention_every: int | None = Field(None, ge=2)
    """Every n-th layer sees all keys, whatever `window`. None means that it holds for every
    layer.
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
        """Positions of the model. 1,024 if they were never set."""
        return self.max_seq_len or 1024

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP, F."""
        gated = math.ceil(8 * self.d_model / 3 / 64) * 64
        return self.d_ff or (gated if self.activation in GATED else 4 * self.d_model)


class Rotary(nn.Module):
    """Rotates pairs of a head's components by an angle proportional to the position.

    Scores then depend on distances only. Component i is paired with i + C/2. If only `rotary_dims`
    components rotate, they are the first rotary_dims / 2 of each half. The tables are fp32 for any
    dtype of the model, recomputed when the model moves to a device, and not part of checkpoints.

    Source: Su et al. 2021, arXiv:2104.09864; linear scaling: Chen et al. 2023, arXiv:2306.15595.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        cos, sin = self._tables(torch.get_default_device())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the factors for a vector and for its swapped halves.

        The first table repeats each cosine, the second each sine with its first half negated.
        """
        config, exact = self.config, float64_device(device)
        if device.type == "meta":  # torch's arange would import its compiler there
            shape = (config.num_positions, config.head_size)
            return torch.empty(shape, device=device), torch.empty(shape, device=device)
        rotated = config.rotary_dims or config.head_size
        exponent = torch.arange(0, rotated, 2, device=exact, dtype=torch.float64) / rotated
        frequency = config.rotary_base**-exponent
        if config.rotary_scaling == "linear":
            frequency = frequency / config.rotary_factor
        elif config.rotary_scaling == "llama3":
            frequency = llama3(frequency, config)
        frequency = functional.pad(frequency, (0, (config.head_size - rotated) // 2))
        position = torch.arange(config.num_positions, device=exact, dtype=torch.float64)
        angle = position[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return tables[0].float().to(device), tables[1].float().to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.cos, self.sin = self._tables(self.cos.device)
        return self

    def forward(self, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Return the tables that `ops.heads` takes, for the positions of `spans`: (start, end).

        Returns: (cos_TC, sin_TC).
        """
        cos, sin = ([table[start:end] for start, end in spans] for table in (self.cos, self.sin))
        return (cos[0], sin[0]) if len(spans) == 1 else (torch.cat(cos), torch.cat(sin))


def llama3(frequency: Tensor, config: TransformerConfig) -> Tensor:
    """Return the low frequencies divided by `rotary_factor`, smoothly joined to the high ones.

    A frequency with less than `rotary_low_factor` periods in `rotary_original_len` tokens is low,
    one with more than `rotary_high_factor` is high and unchanged.

    Shapes:  any.
    Source:  Llama Team 2024, arXiv:2407.21783; the formula is that of Llama 3.1's published code.
    """
    low, high = config.rotary_low_factor, config.rotary_high_factor
    periods = config.rotary_original_len * frequency / (2 * math.pi)
    unchanged = ((periods - low) / (high - low)).clamp(0, 1)
    return frequency * (unchanged + (1 - unchanged) / config.rotary_factor)


def norm_of(config: TransformerConfig) -> nn.Module:
    """Return a new norm of the hidden states."""
    if config.norm == "layernorm":
        return layers.LayerNorm(config.d_model, bias=config.bias, eps=config.layer_norm_eps)
    return layers.RMSNorm(config.d_model, eps=config.rms_norm_eps)


class Attention(nn.Module):
    """Attention with queries, keys and values from one matrix, and an output matrix."""

    def __init__(
        self, config: TransformerConfig, layer: int, rotary: Rotary | None, ops: Ops
    ) -> None:
        super().__init__()
        width, size, eps = config.d_model, config.head_size, config.rms_norm_eps
        self.head_counts = (config.num_heads, config.kv_heads)
        self.window = config.window_of(layer)
        self.ops = ops
        stacked = (config.num_heads + 2 * config.kv_heads) * size
        self.qkv = layers.Linear(width, stacked, bias=config.has_qkv_bias, ops=ops)
        self.output = layers.Linear(config.num_heads * size, width, bias=config.bias, ops=ops)
        self.rms_norm_eps = eps
        self.query_norm = layers.RMSNorm(size, eps=eps) if config.qk_norm else None
        self.key_norm = layers.RMSNorm(size, eps=eps) if config.qk_norm else None
        self.rotary = rotary

    def forward(
        self,
        hidden_BTD: Tensor,
        doc_ids_BT: Tensor | None = None,
        shared: dict[int | None, Mask] | None = None,
        context: Context | None = None,
        cache: KeyValueCache | None = None,
        start: int = 0,
    ) -> Tensor:
        """Return the output of attention for each token. `shared` has `attention.masks`.

        With a context, the tokens are this rank's, and the document ids those of whole rows.

        With a cache the tokens continue a document at the position `start`, and are added to it.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        gain_NC = cos_TC = sin_TC = None
        if self.query_norm is not None and self.key_norm is not None:
            gains = (self.query_norm.weight, self.key_norm.weight)
            gain_NC = torch.cat(
                [local(gain).expand(n, -1) for gain, n in zip(gains, self.head_counts, strict=True)]
            )
        qkv_BTE = self.qkv(hidden_BTD)
        if cache is not None and not torch.is_autocast_enabled(qkv_BTE.device.type):
            qkv_BTE = qkv_BTE.to(hidden_BTD.dtype)  # a matmul of few rows has this dtype
        tokens = qkv_BTE.shape[1]
        spans = (
            [(start, start + tokens)] if context is None else context.spans(tokens * context.size)
        )
        if self.rotary is not None:
            cos_TC, sin_TC = self.rotary(spans)
        q_BHTC, k_BGSC, v_BGSC = self.ops.heads(
            qkv_BTE,
            gain_NC,
            cos_TC,
            sin_TC,
            counts=self.head_counts,
            eps=self.rms_norm_eps,
        )
        if cache is not None:
            k_BGSC, v_BGSC = cache.extend(k_BGSC, v_BGSC, start)
        attend = self.ops.attention if context is None else context.attend(self.ops.attention)
        out_BHTC = attend(
            q_BHTC,
            k_BGSC,
            v_BGSC,
            doc_ids_BS=doc_ids_BT,
            window=self.window,
            mask=shared.get(self.window) if shared else None,
        )
        return self.output(out_BHTC.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """Two linear layers with an activated gate between them. Gate and value are one matmul.

    With SiLU it is SwiGLU, with GELU GeGLU. Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, config: TransformerConfig, ops: Ops) -> None:
        super().__init__()
        width, inner, bias = config.d_model, config.mlp_width, config.bias
        self.activation = GATED[config.activation]
        self.gate_up = layers.Linear(width, 2 * inner, bias=bias, ops=ops)
        self.down = layers.Linear(inner, width, bias=bias, ops=ops)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the output for each token, which does not depend on the others.

        Shapes:  hidden_BTD (B, T, D).
        Returns: hidden_BTD.
        """
        gate_BTF, up_BTF = self.gate_up(hidden_BTD).chunk(2, dim=-1)
        return self.down(self.activation(gate_BTF) * up_BTF)  # type: ignore[no-any-return]


class Block(layers.ResidualBlock):
    """Attention and an MLP. Each reads normalised hidden states and adds to them."""

    def __init__(
        self, config: TransformerConfig, layer: int, rotary: Rotary | None, ops: Ops
    ) -> None:
        super().__init__()
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, layer, rotary, ops)
        self.mlp_norm = norm_of(config)
        if config.activation in GATED:
            self.mlp: nn.Module = GatedMLP(config, ops)
        else:
            self.mlp = layers.MLP(
                config.d_model,
                config.mlp_width,
                activation=PLAIN[config.activation],
                bias=config.bias,
                ops=ops,
            )
        self.dropout = config.dropout
        self.is_parallel = config.parallel_residual

    def forward(
        self,
        hidden_BTD: Tensor,
        doc_ids_BT: Tensor | None = None,
        shared: dict[int | None, Mask] | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the hidden states after this block. `shared` has `attention.masks`.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        normed_BTD = self.attention_norm(hidden_BTD)
        return self.added(hidden_BTD, self.attention(normed_BTD, doc_ids_BT, shared, context))

    def decode(self, hidden_BTD: Tensor, cache: KeyValueCache, start: int) -> Tensor:
        """Return the hidden states of the next tokens of a document, and add them to the cache.

        Shapes:  hidden_BTD (B, T, D), at the positions from `start` on.
        Returns: hidden_BTD.
        """
        normed_BTD = self.attention_norm(hidden_BTD)
        return self.added(hidden_BTD, self.attention(normed_BTD, cache=cache, start=start))


class Transformer(EmbeddingModel):
    """Pre-norm decoder-only transformer."""

    draws_everything: ClassVar[bool] = True
    divides_rows: ClassVar[bool | None] = True
    Config: ClassVar[type[LanguageModelConfig]] = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig, ops: Ops) -> None:
        super().__init__(config, ops)
        width = config.d_model
        rotary = Rotary(config) if config.positions == "rotary" else None
        self.logit_scale = config.logit_scale
        self.dropout = config.dropout
        self.token_embedding = layers.Embedding(config.vocab_size, width)
        self.position_embedding = (
            layers.Embedding(config.num_positions, width) if config.positions == "learned" else None
        )
        self.blocks = nn.ModuleList(
            Block(config, layer, rotary, ops) for layer in range(config.num_layers)
        )
        self.final_norm = norm_of(config)
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

    def embed(self, tokens_BT: Tensor, spans: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Return `EmbeddingModel.embed` in the dtype of the matmuls' results if that is bfloat16.

        Shapes:  tokens_BT (B, T) integers.
        Returns: hidden_BTD.
        Raises:  ShapeError when there is no position for a token.
        """
        return narrowed(super().embed(tokens_BT, spans), self.ops.linear)

    def tensor_cuts(self) -> dict[str, Cut]:
        """Return how ranks share each matrix: by heads, and by columns inside the MLP."""
        config, stacked = self.config, self.stacked_by_ending()
        inner, heads = (config.mlp_width,), (config.num_heads * config.head_size,)
        return self.cuts_by_ending(
            {
                "attention.qkv": (0, stacked["attention.qkv.weight"]),
                "attention.output": (1, heads),
                "mlp.gate_up": (0, stacked["mlp.gate_up.weight"]),
                "mlp.up": (0, inner),
                "mlp.down": (1, inner),
            }
        )

    def share_layers(self, split: Split, *, seq_len: int) -> None:
        """Let this rank compute some heads of attention, as `LanguageModel.share_layers`.

        Raises: ConfigError also when the ranks cannot divide the heads or the MLP.
        """
        for key, count in (
            ("num_heads", self.config.num_heads),
            ("num_kv_heads", self.config.kv_heads),
        ):
            self.check_shares(split, f"model.{key}", count, grows=False)
        self.check_shares(split, "model.d_ff", self.config.mlp_width)
        super().share_layers(split, seq_len=seq_len)
        for block in self.layers:
            attention: Any = block.attention
            heads, groups = attention.head_counts
            attention.head_counts = (heads // split.size, groups // split.size)

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the model accepts."""
        return self.config.num_positions

    def decoder(self, max_tokens: int | None = None) -> Decoder:
        """Return a decoder that caches the keys and values of each layer, within its window if any.

        Memory: 2 L B G C elements per token, for at most `max_tokens` or model.window tokens.
                Allocated at the first read.
        """
        return CachingDecoder(self, self.token_limit(max_tokens))

    def shared_by_blocks(self, tokens_BT: Tensor, doc_ids_BT: Tensor | None) -> tuple[object, ...]:
        """Return the masks of attention, if documents or windows need any.

        Shapes:  tokens_BT, doc_ids_BT (B, T) integers.
        """
        windows = map(self.config.window_of, range(self.config.num_layers))
        # not the embedding's, which a rank of a pipeline may not have
        weight: Any = self.layers[0].mlp_norm.weight  # type: ignore[union-attr]
        dtype = product_dtype(weight, weight)
        found = masks(self.ops.attention, tokens_BT, doc_ids_BT, windows, dtype)
        return (found,) if found else ()

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the training FLOPs per token in sequences of `seq_len`.

        Besides `matmul_flops`, scores and values cost 4 H C per visible key forward, 12 H C in
        training. The input gradient of the first layer counts in full, since the embedding below it
        is trained. So do the matmuls of the loss with the output weight.
        """
        config, matmul = self.config, self.matmul_flops()
        per_key = 12 * config.num_heads * config.head_size
        visible = 0
        for layer in range(config.num_layers):
            window = min(config.window_of(layer) or seq_len, seq_len)
            visible += window * (window + 1) // 2 + (seq_len - window) * window
        return Flops(
            matmul + per_key * config.num_layers * seq_len,
            matmul + Fraction(per_key * visible, seq_len),
        )

    def shared_bytes(self, seq_len: int) -> float:
        """Return the bytes of keys and values in all layers, and of their gradients, in bf16."""
        config = self.config
        return 4.0 * config.num_layers * 2 * config.kv_heads * config.head_size

    def stacked_by_ending(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of query, key and value in `qkv`, and of gate and value in `gate_up`."""
        config = self.config
        heads = (config.num_heads, config.kv_heads, config.kv_heads)
        return {
            "attention.qkv.weight": tuple(count * config.head_size for count in heads),
            "mlp.gate_up.weight": (config.mlp_width, config.mlp_width),
        }


@final
class KeyValueCache:
    """Keys and values of the last `size` tokens of one attention layer.

    The memory is allocated once, at the first use. The token at position p is stored in slot p
    modulo `size`: the slots are in order until all are used, then each new token replaces the
    oldest. Keys are stored with rotary positions applied.

    Memory: 2 B G size C elements of the keys' dtype. All layers of GPT-2 124M take 36 MiB per row
            for 1,024 tokens in bf16.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept_2BGSC: Tensor | None = None

    def extend(self, k_BGTC: Tensor, v_BGTC: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store keys and values from position `start` on, and return those that the new tokens see.

        Shapes:  k_BGTC, v_BGTC (B, G, T, C).
        Returns: (k_BGSC, v_BGSC): up to `size` tokens before the new ones, then the new ones, in
                 order; for one new token the last `size`, itself included, in any order, which does
                 not matter to one query.
        """
        new_2BGTC = torch.stack((k_BGTC, v_BGTC))
        if self._kept_2BGSC is None:
            self._kept_2BGSC = new_2BGTC.new_empty(
                *new_2BGTC.shape[:3], self.size, new_2BGTC.shape[4]
            )
        kept_2BGSC, num_new = self._kept_2BGSC, new_2BGTC.shape[3]
        end = start + num_new
        if num_new == 1 or end <= self.size:
            kept_2BGSC.narrow(3, start % self.size, num_new).copy_(new_2BGTC)
            seen_2BGSC = kept_2BGSC[:, :, :, :end]
        else:
            first = self.size - min(start, self.size)
            in_order_2BGSC = kept_2BGSC.roll(-start, dims=3)[:, :, :, first:]
            seen_2BGSC = torch.cat((in_order_2BGSC, new_2BGTC), dim=3)
            kept_2BGSC.copy_(seen_2BGSC[:, :, :, -self.size :].roll(end, dims=3))
        return seen_2BGSC[0], seen_2BGSC[1]


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
        end = self.num_tokens + tokens_BT.shape[1]
        hidden_BTD = self._model.embed(tokens_BT, [(self.num_tokens, end)])
        for block, cache in zip(self._model.blocks, self._caches, strict=True):
            hidden_BTD = block.decode(hidden_BTD, cache, self.num_tokens)  # type: ignore[operator]
        return self._model.last_logits(hidden_BTD)


USES = ("linear", "attention", "heads")
MODEL = Transformer
