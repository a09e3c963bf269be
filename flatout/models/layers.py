"""Layers that models share: linear layers, norms, the MLP, and the sums of a block.

Letters: B rows, T tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.distributed.tensor import Split, local
from flatout.errors import ConfigError, ShapeError
from flatout.ops import Ops, at_least_fp32
from flatout.ops.heads import rms_normed


class Linear(nn.Linear):
    """torch's linear layer with the matmul of `ops.linear`. The model initialises the weights."""

    before: Callable[[Tensor], Tensor] | None = None
    """Gathers the tokens of all ranks, where they share the output's features."""
    after: Callable[[Tensor], Tensor] | None = None
    """Adds up the results of all ranks, where they share the input's features."""

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
        weight, bias = local(self.weight), local(self.bias)
        if self.after is not None:
            hidden = self.after(self.ops.linear(hidden, weight, None))
            return hidden if bias is None else hidden + bias
        if self.before is not None:
            hidden = self.before(hidden)
        return self.ops.linear(hidden, weight, bias, activation=self.activation)


class Factor(Linear):
    """A linear layer of a recurrence. LoRA adapts none."""


class Embedding(nn.Embedding):
    """torch's embedding. The model initialises the weights."""

    split: Split | None = None
    """The ranks that share the vocabulary."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return each token's vector, or those of this rank if ranks share the vocabulary.

        Shapes:  tokens_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        weight_VD = local(self.weight)
        if self.split is None:
            if torch.compiler.is_compiling() and weight_VD.is_cpu:
                return _Embedded.apply(weight_VD, tokens_BT)  # type: ignore[no-any-return, no-untyped-call]
            return functional.embedding(tokens_BT, weight_VD)
        own_BT = tokens_BT - self.split.rank * len(weight_VD)
        is_own_BT = (own_BT >= 0) & (own_BT < len(weight_VD))
        hidden_BTD = functional.embedding(own_BT.where(is_own_BT, 0), weight_VD)
        return self.split.reduced(hidden_BTD * is_own_BT[..., None])

    def reset_parameters(self) -> None:
        """Do nothing: `LanguageModel.init_weights` initialises the weights."""


class _Embedded(torch.autograd.Function):
    """An embedding whose gradient the compiler leaves to torch's kernel, on a CPU.

    The compiler adds up the rows with atomic operations, ten times slower.
    """

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, tokens_BT: Tensor) -> Tensor:
        """Return the vector of each token."""
        ctx.save_for_backward(tokens_BT)
        ctx.num_rows = len(weight_VD)
        return functional.embedding(tokens_BT, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        """Return the sum of each row's gradients."""
        (tokens_BT,) = ctx.saved_tensors
        grad_VD: Tensor = _added_rows(grad_BTD, tokens_BT, ctx.num_rows)
        return grad_VD, None


@torch.library.custom_op("flatout::added_rows", mutates_args=())
def _added_rows(grad_BTD: Tensor, tokens_BT: Tensor, num_rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad_BTD, tokens_BT, num_rows, -1, False)  # type: ignore[no-any-return]


@_added_rows.register_fake
def _added_shape(grad_BTD: Tensor, tokens_BT: Tensor, num_rows: int) -> Tensor:
    return grad_BTD.new_empty(num_rows, grad_BTD.shape[-1])


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
        weight, bias = at_least_fp32(local(self.weight)), local(self.bias)
        bias = None if bias is None else at_least_fp32(bias)
        is_mixed = hidden.is_cpu and not torch.is_autocast_enabled("cpu")  # torch's kernel converts
        wide = hidden if is_mixed else at_least_fp32(hidden)
        return functional.layer_norm(wide, weight.shape, weight, bias, self.eps).to(hidden.dtype)


class RMSNorm(nn.Module):
    """RMS normalisation in fp32, returned in the input's dtype. `eps` is added to the mean square.

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
        return rms_normed(hidden, local(self.weight), self.eps)


def gelu(hidden: Tensor) -> Tensor:
    """Return GELU by the tanh formula that GPT-2 uses.

    In a compiled model it is x sigmoid(2 u) instead of x (1 + tanh u) / 2, which is equal: on a CPU
    the compiler's tanh takes twice as long.

    Shapes:  any.
    Source:  Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    if not torch.compiler.is_compiling():
        return functional.gelu(hidden, approximate="tanh")
    wide = at_least_fp32(hidden)
    twice_u = 2 * math.sqrt(2 / math.pi) * wide * (1 + 0.044715 * wide * wide)
    return (wide * torch.sigmoid(twice_u)).to(hidden.dtype)


def relu2(hidden: Tensor) -> Tensor:
    """Return the square of the positive part.

    Shapes:  any.
    Source:  So et al. 2021, arXiv:2109.08668.
    """
    return _SquaredReLU.apply(hidden)  # type: ignore[no-any-return, no-untyped-call]


class _SquaredReLU(torch.autograd.Function):
    """Computes the gradient in one pass. Autograd needs four for a matmul and a ReLU."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        """Return the square. The positive part is kept for backward."""
        positive = hidden.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
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
        ops: Ops,
    ) -> None:
        super().__init__()
        self.up = Linear(width, inner, bias=bias, ops=ops, activation=activation)
        self.down = Linear(inner, width, bias=bias, ops=ops)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the output for each token, which does not depend on the others.

        Shapes:  hidden_BTD (B, T, D).
        Returns: hidden_BTD.
        """
        return self.down(self.up(hidden_BTD))  # type: ignore[no-any-return]


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


def dropped(hidden_BTD: Tensor, share: float, training: bool) -> Tensor:
    """Return the hidden states after dropout, unchanged outside training.

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


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` that is nearest to `wanted`. Of two, the larger one."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    divisors = [*small, *(number // one for one in small)]
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), -divisor))
