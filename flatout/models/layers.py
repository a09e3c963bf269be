"""Parts that models share: norms, rotary positions, attention, MLPs, the pre-norm block.

Letters: B rows, T tokens, D width, H query heads, G key and value heads, C head size, F width
         inside the MLP, E = H C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.errors import ShapeError
from flatout.models.decoding import KeyValueCache
from flatout.ops import Ops, at_least_fp32
from flatout.ops.heads import rms_normed


class Linear(nn.Linear):
    """torch's linear layer with its product from `ops.linear`; its weights are the model's to fill,
    not drawn twice.
    """

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
        """Leave the weights to `LanguageModel.init_weights`."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the activations times the weight, plus the bias, through this layer's activation
        if it has one.

        Shapes:  hidden (..., width_in).
        Returns: (..., width_out).
        """
        return self.ops.linear(hidden, self.weight, self.bias, activation=self.activation)


class Embedding(nn.Embedding):
    """torch's table of rows; its weights are the model's to fill, not drawn twice."""

    def reset_parameters(self) -> None:
        """Leave the weights to `LanguageModel.init_weights`."""


class LayerNorm(nn.Module):
    """Subtract the mean, divide by the standard deviation, scale, and shift if there is a bias; in
    fp32, returned in the input's dtype.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised hidden states.

        Shapes:  hidden (..., D).
        Returns: the same shape and dtype.
        """
        bias = None if self.bias is None else at_least_fp32(self.bias)
        return functional.layer_norm(
            at_least_fp32(hidden), self.weight.shape, at_least_fp32(self.weight), bias, 1e-5
        ).to(hidden.dtype)


class RMSNorm(nn.Module):
    """Divide by the root of the mean square plus `eps`, and scale; in fp32, returned in the input's
    dtype.

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


class Rotary(nn.Module):
    """Turn pairs of a head's components by an angle that grows with the position, so that scores
    depend on distance alone.

    Component i is paired with i + C/2. The tables follow from the sizes: they are fp32 whatever the
    model's dtype, made anew wherever the model is moved, and stand in no checkpoint.

    Source: Su et al. 2021, arXiv:2104.09864.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, base: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.base = base
        for name, table in zip(
            ("cos", "sin"), self._tables(torch.get_default_device()), strict=True
        ):
            self.register_buffer(name, table, persistent=False)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines twice over, and sines with the first half negated: what a vector and its swapped
        halves are multiplied by.
        """
        exponent = (
            torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float64) / self.head_dim
        )
        angle = (
            torch.arange(self.max_seq_len, device=device, dtype=torch.float64)[:, None]
            * self.base**-exponent
        )
        sin = angle.sin()
        return torch.cat((angle.cos(), angle.cos()), dim=-1).float(), torch.cat(
            (-sin, sin), dim=-1
        ).float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.cos, self.sin = self._tables(self.cos.device)
        return self

    def forward(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the tables of the positions from `start` to before `end`, which `ops.heads` takes.

        Returns: (cos_TC, sin_TC).
        """
        return self.cos[start:end], self.sin[start:end]


class Attention(nn.Module):
    """Queries, keys and values from one matrix, through `ops.attention`, and back to the model's
    width.
    """

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        window: int | None,
        rotary: Rotary | None,
        qk_norm: bool,
        rms_norm_eps: float,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.head_counts = (num_heads, num_kv_heads)
        self.head_dim = head_dim
        self.window = window
        self.ops = ops
        self.qkv = Linear(width, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias, ops=ops)
        self.output = Linear(num_heads * head_dim, width, bias=bias, ops=ops)
        self.rms_norm_eps = rms_norm_eps
        self.query_norm = RMSNorm(head_dim, eps=rms_norm_eps) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, eps=rms_norm_eps) if qk_norm else None
        self.rotary = rotary

    def forward(self, hidden_BTD: Tensor, doc_ids_BT: Tensor | None) -> Tensor:
        """Return what each token gathers from the tokens it may see.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        return self._gathered(*self._heads(hidden_BTD), doc_ids_BT)

    def decode(self, hidden_BTD: Tensor, cache: KeyValueCache, start: int) -> Tensor:
        """Return what each token gathers from itself and from those before it, whose keys and
        values the cache keeps.

        Shapes:  hidden_BTD (B, T, D), at the positions from `start` on.
        Returns: hidden_BTD.
        """
        q_BHTC, k_BGTC, v_BGTC = self._heads(hidden_BTD, start)
        return self._gathered(q_BHTC, *cache.extend(k_BGTC, v_BGTC, start), None)

    def _heads(self, hidden_BTD: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, by head."""
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

    def _gathered(
        self, q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, doc_ids_BT: Tensor | None
    ) -> Tensor:
        gathered_BHTC = self.ops.attention(
            q_BHTC, k_BGSC, v_BGSC, doc_ids_BT=doc_ids_BT, window=self.window
        )
        gathered_BTE = gathered_BHTC.transpose(1, 2).flatten(2)
        return self.output(gathered_BTE)  # type: ignore[no-any-return]


def gelu(hidden: Tensor) -> Tensor:
    """Return x times the normal distribution's share below x, by GPT-2's tanh formula.

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
    """Its gradient is one pass; autograd's own, of a product and a relu, is four."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        """Return the square, and keep its root."""
        positive = hidden.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return twice the positive part times the gradient."""
        (positive,) = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), grad, positive, value=2)


class MLP(nn.Module):
    """Up, an activation, and down."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        activation: Callable[[Tensor], Tensor],
        bias: bool,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.up = Linear(width, inner, bias=bias, ops=ops, activation=activation)
        self.down = Linear(inner, width, bias=bias, ops=ops)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return each token transformed by itself.

        Shapes:  hidden_BTD (B, T, D).
        Returns: hidden_BTD.
        """
        return self.down(self.up(hidden_BTD))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """Up through a SiLU gate, and down; gate and value come from one matrix.

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, width: int, inner: int, *, bias: bool, ops: Ops) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * inner, bias=bias, ops=ops)
        self.down = Linear(inner, width, bias=bias, ops=ops)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return each token transformed by itself.

        Shapes:  hidden_BTD (B, T, D).
        Returns: hidden_BTD.
        """
        gate_BTF, up_BTF = self.gate_up(hidden_BTD).chunk(2, dim=-1)
        return self.down(functional.silu(gate_BTF) * up_BTF)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each on normalised hidden states and added to them."""

    def __init__(
        self, *, norm: Callable[[], nn.Module], attention: Attention, mlp: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.mlp_norm = norm()
        self.mlp = mlp
        self.dropout = dropout

    def forward(self, hidden_BTD: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
        """Return the hidden states after this block.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        return self._added(hidden_BTD, self.attention(self.attention_norm(hidden_BTD), doc_ids_BT))

    def decode(self, hidden_BTD: Tensor, cache: KeyValueCache, start: int) -> Tensor:
        """Return the hidden states after this block of tokens that go on from those in the cache.

        Shapes:  hidden_BTD (B, T, D), at the positions from `start` on.
        Returns: hidden_BTD.
        """
        return self._added(
            hidden_BTD, self.attention.decode(self.attention_norm(hidden_BTD), cache, start)
        )

    def _added(self, hidden_BTD: Tensor, gathered_BTD: Tensor) -> Tensor:
        hidden_BTD = hidden_BTD + dropped(gathered_BTD, self.dropout, self.training)
        return hidden_BTD + dropped(
            self.mlp(self.mlp_norm(hidden_BTD)), self.dropout, self.training
        )


def dropped(hidden_BTD: Tensor, share: float, training: bool) -> Tensor:
    """Return the hidden states with a share of components zeroed and the rest scaled up; untouched
    outside training.

    Shapes:  hidden_BTD (B, T, D).
    Returns: hidden_BTD.
    Source:  Srivastava et al. 2014.
    """
    return functional.dropout(hidden_BTD, share, training) if training and share else hidden_BTD


def check_length(num_tokens: int, max_seq_len: int) -> None:
    """Refuse tokens for which there is no position.

    Raises: ShapeError.
    """
    if num_tokens > max_seq_len:
        raise ShapeError(
            f"{num_tokens} tokens in a row, and the model has positions for {max_seq_len}.",
            fix=f"Give at most {max_seq_len} tokens, or train a model with model.max_seq_len={num_tokens}.",
        )
