"""The matmul of activations and a weight.

Letters: N rows, I width in, O width out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatout.ops import product_dtype

Activation = Callable[[Tensor], Tensor]
"""An elementwise function, such as GELU."""
FEWEST_ROWS = 8
"""With fewer rows, as in token-by-token decoding, calling oneDNN costs more than the matmul."""


def reference(
    hidden: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Return the activations times the transposed weight, plus the bias, through the activation.

    This is torch's linear, and the definition. The activation is an argument so that a variant can
    return its result in a narrower dtype for the next matmul.

    Shapes:  hidden (..., I); weight_OI (O, I); bias_O (O,).
    Returns: (..., O).
    Cost:    2 N I O FLOP forward, twice that backward.
    """
    product = functional.linear(hidden, weight_OI, bias_O)
    return product if activation is None else activation(product)


def with_matmul(matmul: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the variant of `reference` with the matmul (hidden, weight_OI, bias_O).

    The matmul adds the bias.
    """

    def linear(
        hidden: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        product = matmul(hidden, weight_OI, bias_O)
        return product if activation is None else activation(product)

    return linear


def _by_onednn(hidden: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if not onednn_fits(hidden, weight_OI):
        return functional.linear(hidden, weight_OI, bias_O)
    return _multiplied(onednn_product, hidden, weight_OI, bias_O, torch.float32)


def _in_bf16(hidden: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if bf16_fits(hidden, weight_OI):
        return _multiplied(functional.linear, hidden, weight_OI, bias_O, torch.bfloat16)
    if hidden.dtype == torch.bfloat16 and weight_OI.dtype == torch.float32:
        return functional.linear(hidden.float(), weight_OI, bias_O).bfloat16()
    return functional.linear(hidden, weight_OI, bias_O)


onednn = with_matmul(_by_onednn)
"""`reference` by oneDNN for fp32 on a CPU, forward and backward, otherwise `reference`.

torch uses MKL for fp32 matmuls on a CPU, which on CPUs not made by Intel uses 256-bit vectors.
oneDNN, which torch also includes, uses 512-bit vectors where they exist. The order of summation
differs, so results are equal up to rounding.
"""
bf16 = with_matmul(_in_bf16)
"""`reference` with fp32 factors rounded to bfloat16, for CPUs with bf16 matmuls.

Factors and results are rounded, sums inside a matmul are not, forward and backward. Results and
their gradients are bfloat16. `reference` handles factors of other dtypes and few rows, and returns
the dtype of the hidden states. It runs at twice the rate, and keeps both factors in two bytes.
"""


def narrowed(hidden: Tensor, linear: Callable[..., Tensor]) -> Tensor:
    """Return fp32 hidden states in bfloat16 if `linear` returns that, and others unchanged.

    Then all that reads and adds to them moves half the bytes. Autocast to bfloat16 returns it, too.

    Shapes:  any.
    """
    is_narrow = linear is bf16 or product_dtype(hidden, hidden) == torch.bfloat16
    return hidden.bfloat16() if is_narrow and hidden.dtype == torch.float32 else hidden


def bf16_fits(hidden: Tensor, weight_OI: Tensor) -> bool:
    """Return whether `bf16` rounds these: enough rows, an fp32 weight, and no autocast.

    Shapes:  hidden (..., I); weight_OI (O, I).
    """
    fits = hidden.dtype in (torch.float32, torch.bfloat16) and weight_OI.dtype == torch.float32
    return fits and not (torch.is_autocast_enabled(hidden.device.type) or _has_few_rows(hidden))


def onednn_fits(hidden: Tensor, weight_OI: Tensor) -> bool:
    """Return whether `onednn_product` supports these: enough fp32 rows on a CPU, without autocast.

    Shapes:  hidden (..., I); weight_OI (O, I).
    """
    plain = hidden.device.type == "cpu" and hidden.dtype == weight_OI.dtype == torch.float32
    return (
        plain
        and not _has_few_rows(hidden)
        and not torch.is_autocast_enabled("cpu")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _has_few_rows(hidden: Tensor) -> bool:
    return hidden.numel() // max(hidden.shape[-1], 1) < FEWEST_ROWS


def onednn_product(left_NI: Tensor, right_OI: Tensor) -> Tensor:
    """Return left times right transposed by oneDNN, if `onednn_fits`. It has no gradient.

    Shapes:  left_NI (N, I); right_OI (O, I), either may be a transposed view.
    Returns: (N, O).
    Cost:    2 N I O FLOP.
    """
    if torch.compiler.is_compiling():
        product: Tensor = _opaque_product(left_NI, right_OI)
        return product
    return torch.ops.mkldnn._linear_pointwise(left_NI, right_OI, None, "none", [], "")  # type: ignore[no-any-return]


@torch.library.custom_op("flatout::onednn_product", mutates_args=())
def _opaque_product(left_NI: Tensor, right_OI: Tensor) -> Tensor:
    """A custom op that is not traced: the compiler supports oneDNN's ops for inference only."""
    return torch.ops.mkldnn._linear_pointwise(left_NI, right_OI, None, "none", [], "")  # type: ignore[no-any-return]


@_opaque_product.register_fake
def _product_shape(left_NI: Tensor, right_OI: Tensor) -> Tensor:
    return left_NI.new_empty(left_NI.shape[0], right_OI.shape[0])


def _multiplied(
    matmul: Callable[[Tensor, Tensor], Tensor],
    hidden: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    product_NO: Tensor = _Matmul.apply(matmul, hidden.flatten(0, -2), weight_OI, dtype)  # type: ignore[no-untyped-call]
    product = product_NO.view(*hidden.shape[:-1], weight_OI.shape[0])
    return product if bias_O is None else product + bias_O.to(dtype)


class _Matmul(torch.autograd.Function):
    """A matmul of left and transposed right, for the result and both its gradients.

    Each factor is rounded once, to `dtype`, which the result has too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        matmul: Callable[[Tensor, Tensor], Tensor],
        hidden_NI: Tensor,
        weight_OI: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the product. The rounded factors are kept for backward."""
        ctx.matmul, ctx.hidden_dtype = matmul, hidden_NI.dtype
        hidden_NI, weight_OI = hidden_NI.to(dtype), weight_OI.to(dtype)
        ctx.save_for_backward(hidden_NI, weight_OI)
        return matmul(hidden_NI, weight_OI)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        """Return the gradients of both factors, each in its factor's dtype."""
        hidden_NI, weight_OI = ctx.saved_tensors
        grad_NO = grad_NO.to(hidden_NI.dtype)
        grad_hidden_NI = grad_weight_OI = None
        if ctx.needs_input_grad[1]:
            grad_hidden_NI = ctx.matmul(grad_NO, weight_OI.t()).to(ctx.hidden_dtype)
        if ctx.needs_input_grad[2]:
            # oneDNN copies the left factor, which should be the narrower one.
            if ctx.matmul is onednn_product and hidden_NI.shape[1] <= grad_NO.shape[1]:
                grad_weight_OI = onednn_product(hidden_NI.t(), grad_NO.t()).t()
            else:
                grad_weight_OI = ctx.matmul(grad_NO.t(), hidden_NI.t()).float()
        return None, grad_hidden_NI, grad_weight_OI, None
