"""Layers that models share: norms, attention, MLPs and the pre-norm block.

Letters: B rows, T tokens, D width, H query heads, G key and value heads, C head size, F width
         inside the MLP, E = H C.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from flatout.errors import ConfigError, ShapeError
from flatout.models.decoding import KeyValueCache
from flatout.models.rotary import Rotary
from flatout.ops import Context, Ops, at_least_fp32
from flatout.ops.heads import rms_normed


class Linear(nn.Linear):
    """torch's linear layer with the product of `ops.linear`; the model initialises the weights."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        *,
        bias: bool,
        ops: Ops,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(width_in, width_out, bias=bias)
        self.ops = ops
        self.activation = activation

    def reset_parameters(self) -> None:
        """Do nothing: `LanguageModel.init_weights` initialises the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the product with the weight, plus bias, through this layer's activation if any.

        Shapes:  hidden (..., width_in).
        Returns: (..., width_out).
        """
        return self.ops.linear(hidden, self.weight, self.bias, activation=self.activation)


class Factor(Linear):
    """A linear layer whose product the model computes itself; LoRA adapts none."""


class Embedding(nn.Embedding):
    """torch's embedding; the model initialises the weights."""

    def reset_parameters(self) -> None:
        """Do nothing: `LanguageModel.init_weights` initialises the weights."""


class LayerNorm(nn.Module):
    """Layer normalisation in fp32, returned in the input's dtype, with an optional bias.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(self, width: int, *, bias: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised hidden states.

        Shapes:  hidden (..., D).
        Returns: the same shape and dtype.
        """
        bias = None if self.bias is None else at_least_fp32(self.bias)
        return functional.layer_norm(
            at_least_fp32(hidden), self.weight.shape, at_least_fp32(self.weight), bias, self.eps
        ).to(hidden.dtype)


class RMSNorm(nn.Module):
    """RMS normalisation in fp32, returned in the input's dtype; `eps` is added to the mean square.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised hidden states.

        Shapes:  hidden (..., D).
        Returns: the same shape and dtype.
        """
        return rms_normed(hidden, self.weight, self.eps)


class Attention(nn.Module):
    """Attention with queries, keys and values from one matrix, and an output matrix."""

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        qkv_bias: bool,
        window: int | None,
        softcap: float | None,
        rotary: Rotary | None,
        qk_norm: bool,
        rms_norm_eps: float,
        post_norm: nn.Module | None,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.head_counts = (num_heads, num_kv_heads)
        self.head_dim = head_dim
        self.window = window
        self.softcap = softcap
        self.ops = ops
        self.qkv = Linear(width, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias, ops=ops)
        self.output = Linear(num_heads * head_dim, width, bias=bias, ops=ops)
        self.rms_norm_eps = rms_norm_eps
        self.query_norm = RMSNorm(head_dim, eps=rms_norm_eps) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, eps=rms_norm_eps) if qk_norm else None
        self.post_norm = post_norm
        self.rotary = rotary

    def extra_repr(self) -> str:
        """Return what distinguishes a layer from others with the same modules."""
        return "" if self.window is None else f"window={self.window}"

    def forward(
        self,
        hidden_BTD: Tensor,
        doc_ids_BT: Tensor | None,
        masks: dict[int | None, BlockMask] | None = None,
    ) -> Tensor:
        """Return the output of attention for each token; `masks` has `attention.block_masks`.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        blocks = masks.get(self.window) if masks else None
        return self._attend(*self._heads(hidden_BTD), doc_ids_BT, blocks)

    def decode(self, hidden_BTD: Tensor, cache: KeyValueCache, start: int) -> Tensor:
        """Return the output for the next tokens of a document, and add them to the cache.

        Shapes:  hidden_BTD (B, T, D), at the positions from `start` on.
        Returns: hidden_BTD.
        """
        q_BHTC, k_BGTC, v_BGTC = self._heads(hidden_BTD, start)
        return self._attend(q_BHTC, *cache.extend(k_BGTC, v_BGTC, start))

    def _heads(self, hidden_BTD: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head."""
        num_heads, num_kv_heads = self.head_counts
        gain_NC = None
        if self.query_norm is not None and self.key_norm is not None:
            gain_NC = torch.cat(
                (
                    self.query_norm.weight.expand(num_heads, -1),
                    self.key_norm.weight.expand(num_kv_heads, -1),
                )
            )
        cos_TC, sin_TC = (
            (None, None) if self.rotary is None else self.rotary(start, start + hidden_BTD.shape[1])
        )
        return self.ops.heads(
            self.qkv(hidden_BTD),
            gain_NC,
            cos_TC,
            sin_TC,
            counts=self.head_counts,
            eps=self.rms_norm_eps,
        )

    def _attend(
        self,
        q_BHTC: Tensor,
        k_BGSC: Tensor,
        v_BGSC: Tensor,
        doc_ids_BT: Tensor | None = None,
        blocks: BlockMask | None = None,
    ) -> Tensor:
        out_BHTC = self.ops.attention(
            q_BHTC,
            k_BGSC,
            v_BGSC,
            doc_ids_BT=doc_ids_BT,
            window=self.window,
            softcap=self.softcap,
            blocks=blocks,
        )
        return normed(self.output(out_BHTC.transpose(1, 2).flatten(2)), self.post_norm)


def gelu(hidden: Tensor) -> Tensor:
    """Return GELU by the tanh formula that GPT-2 uses.

    Shapes:  any.
    Source:  Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return functional.gelu(hidden, approximate="tanh")


def relu2(hidden: Tensor) -> Tensor:
    """Return the square of the positive part.

    Shapes:  any.
    Source:  So et al. 2021, arXiv:2109.08668.
    """
    return _SquaredReLU.apply(hidden)  # type: ignore[no-any-return, no-untyped-call]


class _SquaredReLU(torch.autograd.Function):
    """Computes the gradient in one pass; autograd needs four for a product and a ReLU."""

    @staticmethod
    def forward(ctx: Context, hidden: Tensor) -> Tensor:
        """Return the square; the positive part is kept for backward."""
        positive = hidden.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        """Return twice the positive part times the gradient."""
        (positive,) = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), grad, positive, value=2)


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        activation: Callable[[Tensor], Tensor],
        bias: bool,
        post_norm: nn.Module | None = None,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.up = Linear(width, inner, bias=bias, ops=ops, activation=activation)
        self.down = Linear(inner, width, bias=bias, ops=ops)
        self.post_norm = post_norm

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the output for each token, which does not depend on the others.

        Shapes:  hidden_BTD (B, T, D).
        Returns: hidden_BTD.
        """
        return normed(self.down(self.up(hidden_BTD)), self.post_norm)


class GatedMLP(nn.Module):
    """Two linear layers with an activated gate between them; gate and value are one product.

    With SiLU it is SwiGLU, with GELU GeGLU. Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        activation: Callable[[Tensor], Tensor],
        bias: bool,
        post_norm: nn.Module | None,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = Linear(width, 2 * inner, bias=bias, ops=ops)
        self.down = Linear(inner, width, bias=bias, ops=ops)
        self.post_norm = post_norm

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the output for each token, which does not depend on the others.

        Shapes:  hidden_BTD (B, T, D).
        Returns: hidden_BTD.
        """
        gate_BTF, up_BTF = self.gate_up(hidden_BTD).chunk(2, dim=-1)
        return normed(self.down(self.activation(gate_BTF) * up_BTF), self.post_norm)


class ResidualBlock(nn.Module):
    """A block that mixes tokens and ends with an MLP, each added to the hidden states."""

    mlp_norm: nn.Module
    mlp: nn.Module
    dropout: float
    is_parallel: bool = False
    """Whether the MLP reads the hidden states before the mixed tokens are added."""

    def added(self, hidden_BTD: Tensor, mixed_BTD: Tensor) -> Tensor:
        """Return the hidden states plus the mixed tokens, and plus the MLP.

        Shapes:  hidden_BTD, mixed_BTD (B, T, D).
        Returns: hidden_BTD.
        """
        sum_BTD = hidden_BTD + dropped(mixed_BTD, self.dropout, self.training)
        mlp_BTD = self.mlp(self.mlp_norm(hidden_BTD if self.is_parallel else sum_BTD))
        return sum_BTD + dropped(mlp_BTD, self.dropout, self.training)


class Block(ResidualBlock):
    """Attention and an MLP; each reads normalised hidden states and adds to them."""

    def __init__(
        self,
        *,
        norm: Callable[[], nn.Module],
        attention: Attention,
        mlp: nn.Module,
        dropout: float,
        is_parallel: bool,
    ) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.mlp_norm = norm()
        self.mlp = mlp
        self.dropout = dropout
        self.is_parallel = is_parallel

    def forward(
        self,
        hidden_BTD: Tensor,
        doc_ids_BT: Tensor | None = None,
        masks: dict[int | None, BlockMask] | None = None,
    ) -> Tensor:
        """Return the hidden states after this block; `masks` has `attention.block_masks`.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        normed_BTD = self.attention_norm(hidden_BTD)
        return self.added(hidden_BTD, self.attention(normed_BTD, doc_ids_BT, masks))

    def decode(self, hidden_BTD: Tensor, cache: KeyValueCache, start: int) -> Tensor:
        """Return the hidden states of the next tokens of a document, and add them to the cache.

        Shapes:  hidden_BTD (B, T, D), at the positions from `start` on.
        Returns: hidden_BTD.
        """
        normed_BTD = self.attention_norm(hidden_BTD)
        return self.added(hidden_BTD, self.attention.decode(normed_BTD, cache, start))


def normed(hidden_BTD: Tensor, norm: nn.Module | None) -> Tensor:
    """Return the hidden states after a norm; unchanged without one.

    Shapes:  hidden_BTD (B, T, D).
    """
    return hidden_BTD if norm is None else norm(hidden_BTD)


def dropped(hidden_BTD: Tensor, share: float, training: bool) -> Tensor:
    """Return the hidden states after dropout; unchanged outside training.

    Shapes:  hidden_BTD (B, T, D).
    Returns: hidden_BTD.
    Source:  Srivastava et al. 2014.
    """
    return functional.dropout(hidden_BTD, share, training) if training and share else hidden_BTD


def check_length(num_tokens: int, max_seq_len: int) -> None:
    """Check that there is a position for each token.

    Raises: ShapeError.
    """
    if num_tokens > max_seq_len:
        raise ShapeError(
            f"A sequence of {num_tokens} tokens exceeds the model's {max_seq_len} positions.",
            fix=f"Pass at most {max_seq_len} tokens, or train a model with "
            f"model.max_seq_len={num_tokens}.",
        )


def check_positions(max_seq_len: int | None, seq_len: int) -> None:
    """Check that a model with this many positions, None for any, can train on sequences.

    Raises: ConfigError with the keys to set.
    """
    if max_seq_len is not None and seq_len > max_seq_len:
        raise ConfigError(
            f"data.seq_len={seq_len} exceeds the model's {max_seq_len} positions "
            f"(model.max_seq_len={max_seq_len}).",
            fix=f"Set model.max_seq_len={seq_len}, or data.seq_len={max_seq_len}.",
        )
