"""The matmul of activations and a weight.

Letters: N rows, I width in, O width out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
    """Return the variant of `reference` with the matmul (hidden, weight_OI, bias_O, stays_narrow).

    The matmul adds the bias. It may return its result in a narrower dtype if `stays_narrow`: an
    activation follows, and then the next matmul.
    """

    def linear(
        hidden: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        product = matmul(hidden, weight_OI, bias_O, activation is not None and bias_O is None)
        return product if activation is None else activation(product)

    return linear


def _by_onednn(hidden: Tensor, weight_OI: Tensor, bias_O: Tensor | None, _narrow: bool) -> Tensor:
    if not onednn_fits(hidden, weight_OI):
        return functional.linear(hidden, weight_OI, bias_O)
    return _multiplied(onednn_product, hidden, weight_OI, bias_O, torch.float32, torch.float32)


def _in_bf16(
    hidden: Tensor, weight_OI: Tensor, bias_O: Tensor | None, stays_narrow: bool
) -> Tensor:
    if not bf16_fits(hidden, weight_OI):
        widened = hidden.dtype == torch.bfloat16 and weight_OI.dtype == torch.float32
        return functional.linear(hidden.float() if widened else hidden, weight_OI, bias_O)
    result = torch.bfloat16 if stays_narrow else torch.float32
    return _multiplied(functional.linear, hidden, weight_OI, bias_O, torch.bfloat16, result)


onednn = with_matmul(_by_onednn)
"""`reference` by oneDNN for fp32 on a CPU, forward and backward, otherwise `reference`.

torch uses MKL for fp32 matmuls on a CPU, which on CPUs not made by Intel uses 256-bit vectors.
oneDNN, which torch also includes, uses 512-bit vectors where they exist. The order of summation
differs, so results are equal up to rounding.
"""
bf16 = with_matmul(_in_bf16)
"""`reference` with fp32 factors rounded to bfloat16, for CPUs with bf16 matmuls.

Factors and results are rounded, sums are not, forward and backward. Unlike with autocast, only the
matmuls are narrow: everything else stays fp32, which CPUs handle well. An activated result without
a bias stays in bfloat16 for the next matmul, which would round it anyway. So does its gradient.
`reference` handles factors of other dtypes and few rows. It runs at twice the rate, and keeps both
factors in two bytes.
"""


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
    factors: torch.dtype,
    result: torch.dtype,
) -> Tensor:
    product_NO: Tensor = _Matmul.apply(matmul, hidden.flatten(0, -2), weight_OI, factors, result)  # type: ignore[no-untyped-call]
    product = product_NO.view(*hidden.shape[:-1], weight_OI.shape[0])
    return product if bias_O is None else product + bias_O


class _Matmul(torch.autograd.Function):
    """A matmul of left and transposed right, for the result and both its gradients.

    Each factor is rounded once, to the dtype `factors`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        matmul: Callable[[Tensor, Tensor], Tensor],
        hidden_NI: Tensor,
        weight_OI: Tensor,
        factors: torch.dtype,
        result: torch.dtype,
    ) -> Tensor:
        """Return the product in the dtype `result`. The rounded factors are kept for backward."""
        ctx.matmul, ctx.hidden_dtype = matmul, hidden_NI.dtype
        hidden_NI, weight_OI = hidden_NI.to(factors), weight_OI.to(factors)
        ctx.save_for_backward(hidden_NI, weight_OI)
        product_NO = matmul(hidden_NI, weight_OI)
        # A conversion to the same dtype would return an alias of the product, which torch 2.11
        # compiles without a gradient.
        return product_NO if product_NO.dtype == result else product_NO.to(result)

    @staticmethod
    def backward(
        ctx: Any, grad_NO: Tensor
    ) -> tuple[None, Tensor | None, Tensor | None, None, None]:
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
        return None, grad_hidden_NI, grad_weight_OI, None, None
