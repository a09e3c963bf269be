"""The product of activations and a weight.

Letters: N rows, I width in, O width out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from flatout.ops.autograd import Context

Activation = Callable[[Tensor], Tensor]
"""An elementwise function, such as GELU."""
FEWEST_ROWS = 8
"""With fewer rows, as in token-by-token decoding, calling oneDNN costs more than the product."""


def reference(
    hidden: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Return the activations times the transposed weight, plus the bias, through the activation.

    This is torch's linear, and the definition. The activation is an argument so that a variant can
    return its result in a narrower dtype for the next product.

    Shapes:  hidden (..., I); weight_OI (O, I); bias_O (O,).
    Returns: (..., O).
    Cost:    2 N I O FLOP forward, twice that backward.
    """
    return _activated(functional.linear(hidden, weight_OI, bias_O), activation)


def onednn(
    hidden: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """`reference` by oneDNN for fp32 on a CPU, forward and backward; otherwise `reference`.

    torch uses MKL for fp32 products on a CPU, which on CPUs not made by Intel uses 256-bit vectors;
    oneDNN, which torch also includes, uses 512-bit vectors where they exist. The order of summation
    differs, so results are equal up to rounding.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`.
    """
    if not onednn_fits(hidden, weight_OI):
        return _activated(functional.linear(hidden, weight_OI, bias_O), activation)
    product: Tensor = _OneDnn.apply(hidden.flatten(0, -2), weight_OI)  # type: ignore[no-untyped-call]
    product = product.view(*hidden.shape[:-1], weight_OI.shape[0])
    return _activated(product if bias_O is None else product + bias_O, activation)


def bf16(
    hidden: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """`reference` with fp32 factors rounded to bfloat16, for CPUs with bf16 products.

    Factors and results are rounded, sums are not, forward and backward. Unlike with autocast, only
    the products are narrow: everything else stays fp32, which CPUs handle well. An activated result
    without a bias stays in bfloat16 for the next product, which would round it anyway; so does its
    gradient. `reference` handles factors of other dtypes and few rows.

    Shapes:  as `reference`.
    Returns: as `reference`; in bfloat16 when activated, without a bias.
    Cost:    as `reference`, at twice the rate; keeps both factors in two bytes.
    """
    fits = hidden.dtype in (torch.float32, torch.bfloat16) and weight_OI.dtype == torch.float32
    if (
        not fits
        or torch.is_autocast_enabled(hidden.device.type)
        or hidden.numel() // max(hidden.shape[-1], 1) < FEWEST_ROWS
    ):
        return _activated(
            functional.linear(hidden.to(weight_OI.dtype) if fits else hidden, weight_OI, bias_O),
            activation,
        )
    stays_narrow = activation is not None and bias_O is None
    product: Tensor = _Bf16.apply(
        hidden.flatten(0, -2), weight_OI, torch.bfloat16 if stays_narrow else torch.float32
    )  # type: ignore[no-untyped-call]
    product = product.view(*hidden.shape[:-1], weight_OI.shape[0])
    return _activated(product if bias_O is None else product + bias_O, activation)


def onednn_fits(hidden: Tensor, weight_OI: Tensor) -> bool:
    """Return whether `onednn_product` supports these: enough fp32 rows on a CPU, without autocast.

    Shapes:  hidden (..., I); weight_OI (O, I).
    """
    plain = hidden.device.type == "cpu" and hidden.dtype == weight_OI.dtype == torch.float32
    return (
        plain
        and hidden.numel() // max(hidden.shape[-1], 1) >= FEWEST_ROWS
        and not torch.is_autocast_enabled("cpu")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def onednn_product(left_NI: Tensor, right_OI: Tensor) -> Tensor:
    """Return left times right transposed by oneDNN, if `onednn_fits`; it has no gradient.

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


class _OneDnn(torch.autograd.Function):
    """The product and both its gradients."""

    @staticmethod
    def forward(ctx: Context, hidden_NI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the product; both factors are kept for backward."""
        ctx.save_for_backward(hidden_NI, weight_OI)
        product_NO: Tensor = onednn_product(hidden_NI, weight_OI)
        return product_NO

    @staticmethod
    def backward(ctx: Context, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of both factors."""
        hidden_NI, weight_OI = ctx.saved_tensors
        grad_hidden_NI = onednn_product(grad_NO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        grad_weight_OI = _weight_gradient(hidden_NI, grad_NO) if ctx.needs_input_grad[1] else None
        return grad_hidden_NI, grad_weight_OI


def _weight_gradient(hidden_NI: Tensor, grad_NO: Tensor) -> Tensor:
    """Return the weight's gradient with the narrower factor on the left, which oneDNN copies."""
    if hidden_NI.shape[1] <= grad_NO.shape[1]:
        return onednn_product(hidden_NI.t(), grad_NO.t()).t()
    return onednn_product(grad_NO.t(), hidden_NI.t())


class _Bf16Context(Context, Protocol):
    hidden_dtype: torch.dtype


class _Bf16(torch.autograd.Function):
    """The product and both its gradients; each factor is rounded once."""

    @staticmethod
    def forward(
        ctx: _Bf16Context, hidden_NI: Tensor, weight_OI: Tensor, result: torch.dtype
    ) -> Tensor:
        """Return the product in the requested dtype; the rounded factors are kept for backward."""
        narrow_NI, narrow_OI = hidden_NI.bfloat16(), weight_OI.bfloat16()
        ctx.save_for_backward(narrow_NI, narrow_OI)
        ctx.hidden_dtype = hidden_NI.dtype
        product_NO = functional.linear(narrow_NI, narrow_OI)
        # A conversion to the same dtype would return an alias of the product, which torch 2.11
        # compiles without a gradient.
        return product_NO if product_NO.dtype == result else product_NO.to(result)

    @staticmethod
    def backward(ctx: _Bf16Context, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of both factors, each in its factor's dtype."""
        narrow_NI, narrow_OI = ctx.saved_tensors
        narrow_NO = grad_NO.bfloat16()
        grad_hidden_NI = (
            (narrow_NO @ narrow_OI).to(ctx.hidden_dtype) if ctx.needs_input_grad[0] else None
        )
        grad_weight_OI = (narrow_NO.t() @ narrow_NI).float() if ctx.needs_input_grad[1] else None
        return grad_hidden_NI, grad_weight_OI, None


def _activated(product: Tensor, activation: Activation | None) -> Tensor:
    return product if activation is None else activation(product)
