"""The loss of a language model, from the last hidden states and the output weight.

Letters: B rows, T tokens, N = B T targets, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from flatout.errors import MissingPackage, ShapeError
from flatout.ops import (
    at_least_fp32,
    linear,
    loss_chunks,
    product_dtype,
)
from flatout.ops.autograd import Context
from flatout.ops.loss_chunks import IGNORED as IGNORED
from flatout.ops.loss_chunks import capped as capped
from flatout.ops.uncompiled import uncompiled


def reference(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the targets under softmax(hidden @ weight^T), and their number.

    The loss is the negative log-likelihood. A target of -1 is ignored: its hidden state, even NaN,
    affects neither the loss nor a gradient. With `softcap` c the logits are c tanh(logits / c);
    `z_loss` z adds z times the squared log of the softmax denominator for each target. This code,
    with all logits in memory and plain functions, is the definition; every variant must match it,
    gradients included.

    Shapes:  hidden_BTD (B, T, D); weight_VD (V, D); targets_BT (B, T) int64 in [-1, V).
    Returns: (loss_sum, num_valid): scalars, fp32 (fp64 for fp64) and int64. Both are 0 when all
             targets are ignored.
    Units:   loss in nats, summed, not averaged.
    Cost:    2 B T D V FLOP forward, twice that backward; logits and their log-softmax (fp32) are
             kept for backward.
    Raises:  ShapeError when the shapes do not match.
    Source:  softcap: Gemma Team 2024, arXiv:2408.00118; z-loss: Chowdhery et al. 2022,
             arXiv:2204.02311, section 5.
    """
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    logits_BTV = capped(at_least_fp32(functional.linear(hidden_BTD, weight_VD)), softcap)
    log_sum_BT = logits_BTV.logsumexp(dim=-1)
    losses_BT = (
        log_sum_BT
        - logits_BTV.gather(-1, targets_BT.clamp_min(0)[..., None])[..., 0]
        + z_loss * log_sum_BT.square()
    )
    return losses_BT.masked_fill(~valid_BT, 0.0).sum(), valid_BT.sum()


def fused(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`reference` through torch's cross_entropy, which gathers and sums in one pass.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`, with fewer passes over the logits.
    Raises:  ShapeError as `reference`.
    """
    return _with_all_logits(
        functional.linear, hidden_BTD, weight_VD, targets_BT, softcap=softcap, z_loss=z_loss
    )


def onednn(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`fused` with the products of `flatout.ops.linear.onednn`, for fp32 on a CPU.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `fused`.
    Raises:  ShapeError as `reference`.
    """
    return _with_all_logits(
        linear.onednn, hidden_BTD, weight_VD, targets_BT, softcap=softcap, z_loss=z_loss
    )


def bf16(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`fused` with the products of `flatout.ops.linear.bf16`, for CPUs with bf16 products.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `fused`.
    Raises:  ShapeError as `reference`.
    """
    return _with_all_logits(
        linear.bf16, hidden_BTD, weight_VD, targets_BT, softcap=softcap, z_loss=z_loss
    )


def chunked(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`reference` in chunks of a few thousand targets, so that all logits never exist at once.

    The gradients are computed together with the loss, before backward needs them.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    6 B T D V FLOP, all of it forward; keeps the gradients of hidden states and weight, the
             latter in fp32.
    Raises:  ShapeError as `reference`.
    """
    return _in_chunks(loss_chunks, hidden_BTD, weight_VD, targets_BT, softcap, z_loss)


def liger(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`reference` through Liger's kernel, which replaces logits by gradients, summed in fp32.

    It processes a few hundred targets at a time. For GPUs with the package liger-kernel; on a CPU
    and in fp64 it is `chunked`. Each call reads the number of targets back and so waits for the
    device. Compilers do not trace it.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `chunked`; keeps about as many logits as there are components of hidden states.
    Raises:  ShapeError as `reference`; MissingPackage.
    Source:  Hsu et al. 2024, arXiv:2410.10989.
    """
    if not hidden_BTD.is_cuda or torch.float64 in (hidden_BTD.dtype, weight_VD.dtype):
        return chunked(hidden_BTD, weight_VD, targets_BT, softcap=softcap, z_loss=z_loss)
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    loss_sum: Tensor = _by_liger(
        hidden_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), softcap, z_loss
    )
    return loss_sum, valid_BT.sum()


@uncompiled  # reading back breaks the graph
def _by_liger(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError as error:
        raise MissingPackage(
            "The speedup liger-ce needs the package liger-kernel, which is not installed.",
            fix='Install it: `pip install "flatout[liger]"`, or remove liger-ce from speedups.',
        ) from error
    if torch.is_grad_enabled() and weight_VD.requires_grad and not hidden_ND.requires_grad:
        # The kernel computes no gradient for the weight alone.
        hidden_ND = hidden_ND.detach().requires_grad_()
    function: Any = LigerFusedLinearCrossEntropyFunction
    # bias, class weights, ignored target, z-loss, smoothing, reduction, softcap, whether to return
    # the z-loss separately, dtype in which the weight's gradient is accumulated
    options = (None, None, IGNORED, z_loss, 0.0, "sum", softcap, False, torch.float32)
    loss_sum: Tensor = function.apply(hidden_ND, weight_VD, targets_N, *options)[0]
    return loss_sum


def _in_chunks(
    method: ModuleType,
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    softcap: float | None,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Return the result of `reference` by `loss_chunks` or `loss_rows`."""
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
    loss_sum: Tensor
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
        is_trained = weight_VD.requires_grad
        loss_sum = _WithGradients.apply(  # type: ignore[no-untyped-call]
            method, hidden_ND, weight_VD, targets_N, softcap, z_loss, is_trained
        )
    else:
        dtype = product_dtype(hidden_ND, weight_VD)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            loss_sum = method.loss_only(
                hidden_ND.to(dtype), weight_VD.to(dtype), targets_N, softcap, z_loss
            )
    return loss_sum, valid_BT.sum()


class _Kept(Context, Protocol):
    dtype: torch.dtype
    dtypes: tuple[torch.dtype, torch.dtype]
    is_trained: bool


class _WithGradients(torch.autograd.Function):
    """The summed loss, with gradients that are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: _Kept,
        method: ModuleType,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        softcap: float | None,
        z_loss: float,
        is_trained: bool,
    ) -> Tensor:
        """Return the loss; both gradients are kept for backward, unless the weight is frozen."""
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype)
        ctx.is_trained = is_trained
        ctx.dtype = product_dtype(hidden_ND, weight_VD)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            loss_sum, *gradients = method.loss_and_gradients(
                hidden_ND.to(ctx.dtype),
                weight_VD.to(ctx.dtype),
                targets_N,
                softcap,
                z_loss,
                is_trained,
            )
        ctx.save_for_backward(*gradients)
        return cast(Tensor, loss_sum)

    @staticmethod
    def backward(
        ctx: _Kept, grad: Tensor
    ) -> tuple[None, Tensor, Tensor | None, None, None, None, None]:
        """Return the kept gradients times the gradient of the loss, multiplied in at least fp32.

        The gradient of the hidden states is rounded to the dtype of their product with the weight,
        so that values beyond the range of float16 become infinite.
        """
        grad_ND, grad_VD = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        grad_ND = (at_least_fp32(grad_ND) * grad).to(ctx.dtype).to(hidden_dtype)
        summed_VD = (grad_VD * grad).to(weight_dtype) if ctx.is_trained else None
        return None, grad_ND, summed_VD, None, None, None, None


def of_logits(
    logits_BTV: Tensor, targets_BT: Tensor, *, softcap: float | None = None, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the result of `reference`, from logits that a model has computed itself.

    Shapes:  logits_BTV (B, T, V); targets_BT (B, T) int64 in [-1, V).
    Returns: as `reference`.
    """
    valid_BT = targets_BT != IGNORED
    logits_BTV = logits_BTV.masked_fill(~valid_BT[..., None], 0.0)
    return _summed(logits_BTV, targets_BT, softcap, z_loss), valid_BT.sum()


def _with_all_logits(
    product: Callable[[Tensor, Tensor], Tensor],
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    return _summed(product(hidden_BTD, weight_VD), targets_BT, softcap, z_loss), valid_BT.sum()


def _summed(logits_BTV: Tensor, targets_BT: Tensor, softcap: float | None, z_loss: float) -> Tensor:
    logits_NV = capped(at_least_fp32(logits_BTV).flatten(0, 1), softcap)
    targets_N = targets_BT.flatten()
    loss_sum = functional.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        squares_N = logits_NV.logsumexp(dim=-1).square().masked_fill(targets_N == IGNORED, 0.0)
        loss_sum = loss_sum + z_loss * squares_N.sum()
    return loss_sum


def _valid_only(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states with zeros where the target is ignored, and where it is not.

    0 x NaN would be NaN in the weight's gradient.
    """
    if hidden_BTD.shape[:-1] != targets_BT.shape or hidden_BTD.shape[-1] != weight_VD.shape[-1]:
        raise ShapeError(
            f"The loss got hidden states {tuple(hidden_BTD.shape)}, weight "
            f"{tuple(weight_VD.shape)}, targets {tuple(targets_BT.shape)}.",
            fix="Give one target per hidden state, and a weight of the same width.",
        )
    valid_BT = targets_BT != IGNORED
    return hidden_BTD.masked_fill(~valid_BT[..., None], 0.0), valid_BT
