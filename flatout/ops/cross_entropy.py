"""The loss of a language model, from the last hidden states and the output weight.

Letters: B rows, T tokens, N = B T targets, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from flatout.errors import MissingPackage, ShapeError
from flatout.ops import at_least_fp32, linear, loss_chunks
from flatout.ops.loss_chunks import IGNORED as IGNORED
from flatout.ops.loss_chunks import capped as capped


def reference(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Summed negative log-likelihood of the targets under softmax(hidden @ weight^T), and how many
    targets counted.

    A target of -1 is ignored: whatever its hidden state holds, NaN included, reaches neither the
    loss nor a gradient. With `softcap` c the logits are c tanh(logits / c); with `z_loss` z, z
    times the square of each target's logarithm of the softmax's denominator is added. Whole logits
    and plain functions are the definition; every variant must match it, gradients included.

    Shapes:  hidden_BTD (B, T, D); weight_VD (V, D); targets_BT (B, T) int64 in [-1, V).
    Returns: (loss_sum, num_valid): scalars, fp32 (fp64 for fp64) and int64. Both are 0 when nothing
             counts.
    Units:   loss in nats, summed, not averaged.
    Cost:    2 B T D V FLOP forward, twice that backward; logits and their log-softmax (fp32) are
             kept for backward.
    Raises:  ShapeError when the shapes do not fit.
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
    """`reference` through torch's own cross_entropy, which gathers and sums in one pass.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`, fewer passes over the logits.
    Raises:  ShapeError as `reference`.
    """
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    return _summed(
        functional.linear(hidden_BTD, weight_VD), targets_BT, softcap, z_loss
    ), valid_BT.sum()


def onednn(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`fused`, with the products of `flatout.ops.linear.onednn`: for fp32 on a CPU.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `fused`.
    Raises:  ShapeError as `reference`.
    """
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    return _summed(
        linear.onednn(hidden_BTD, weight_VD), targets_BT, softcap, z_loss
    ), valid_BT.sum()


def bf16(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`fused`, with the products of `flatout.ops.linear.bf16`: for CPUs that multiply bfloat16.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `fused`.
    Raises:  ShapeError as `reference`.
    """
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    return _summed(linear.bf16(hidden_BTD, weight_VD), targets_BT, softcap, z_loss), valid_BT.sum()


def chunked(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`reference`, a few thousand targets at a time: logits are never whole, and the gradients are
    made with them, before backward asks.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    6 B T D V FLOP, all of it forward; keeps the gradients of hidden states and weight, the
             latter in fp32.
    Raises:  ShapeError as `reference`.
    """
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    return _in_parts(
        loss_chunks,
        _Chunked,
        hidden_BTD.flatten(0, 1),
        weight_VD,
        targets_BT.flatten(),
        softcap,
        z_loss,
    ), valid_BT.sum()


def triton(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`chunked`, with a kernel that turns logits into their gradient in place, and with products
    that sum the weight's gradient in fp32.

    For GPUs, with the package triton; on a CPU, and in fp64, it is `chunked`. It never waits for
    the device, and gives the same bits every time.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `chunked`; a chunk's logits are read twice, once out of the cache, and written over
             once.
    Raises:  ShapeError as `reference`; MissingPackage.
    Source:  the running maximum of the logits: Milakov and Gimelshein 2018, arXiv:1805.02867;
             gradients in place: Hsu et al. 2024, arXiv:2410.10989.
    """
    if torch.float64 in (hidden_BTD.dtype, weight_VD.dtype) or not _runs_triton(hidden_BTD):
        return chunked(hidden_BTD, weight_VD, targets_BT, softcap=softcap, z_loss=z_loss)
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    return _in_parts(
        _rows(), _ByRows, hidden_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), softcap, z_loss
    ), valid_BT.sum()


def liger(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`reference` through Liger's kernel, which turns logits into gradients in place, a few hundred
    targets at a time; sums in fp32.

    For GPUs, with the package liger-kernel; on a CPU, and in fp64, it is `chunked`. It reads the
    number of targets back, in each call, and so waits for the device. A compiler leaves it as it
    is.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `chunked`; holds about as many logits as there are components of hidden states.
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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads back, which no graph can hold
def _by_liger(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError as error:
        raise MissingPackage(
            "liger-ce takes the package liger-kernel, which is not installed.",
            fix='Install it: `pip install "flatout[liger]"`.',
        ) from error
    if torch.is_grad_enabled() and weight_VD.requires_grad and not hidden_ND.requires_grad:
        hidden_ND = (
            hidden_ND.detach().requires_grad_()
        )  # the kernel makes no gradient of the weight alone
    function: Any = LigerFusedLinearCrossEntropyFunction
    # bias, class weights, ignored target, z-loss, smoothing, reduction, cap, z-loss apart, type of
    # the weight's gradient while it is summed
    options = (None, None, IGNORED, z_loss, 0.0, "sum", softcap, False, torch.float32)
    loss_sum: Tensor = function.apply(hidden_ND, weight_VD, targets_N, *options)[0]
    return loss_sum


def _in_parts(
    way: Any,
    function: type[torch.autograd.Function],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    """Return the summed loss by a module with `learned` and `scored`; `function` is that with
    gradients.
    """
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
        learned: Tensor = function.apply(hidden_ND, weight_VD, targets_N, softcap, z_loss)  # type: ignore[no-untyped-call]
        return learned
    narrow = _arithmetic(hidden_ND, weight_VD)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        scored: Tensor = way.scored(
            hidden_ND.to(narrow), weight_VD.to(narrow), targets_N, softcap, z_loss
        )
        return scored


class _Chunked(torch.autograd.Function):
    """The summed loss, and its gradients made with it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        softcap: float | None,
        z_loss: float,
    ) -> Tensor:
        """Return the loss, and keep both gradients."""
        return _learned(ctx, loss_chunks, hidden_ND, weight_VD, targets_N, softcap, z_loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Return what was kept, times the gradient of the loss."""
        return *_kept_times(ctx, grad), None, None, None


class _ByRows(torch.autograd.Function):
    """`_Chunked` with Triton's kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        softcap: float | None,
        z_loss: float,
    ) -> Tensor:
        """Return the loss, and keep both gradients."""
        return _learned(ctx, _rows(), hidden_ND, weight_VD, targets_N, softcap, z_loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Return what was kept, times the gradient of the loss."""
        return *_kept_times(ctx, grad), None, None, None


def _learned(
    ctx: Any,
    way: Any,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    """Return the loss by a module with `learned`, and keep both gradients."""
    ctx.narrow = _arithmetic(hidden_ND, weight_VD)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        loss_sum, *gradients = way.learned(
            hidden_ND.to(ctx.narrow), weight_VD.to(ctx.narrow), targets_N, softcap, z_loss
        )
    ctx.save_for_backward(*gradients)
    ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype)
    return cast(Tensor, loss_sum)


def _kept_times(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kept gradients times that of the loss, multiplied in fp32 at least.

    That of the hidden states is rounded as their product with the weight was: what is beyond
    float16 is infinite there.
    """
    kept_ND, kept_VD = ctx.saved_tensors
    hidden_dtype, weight_dtype = ctx.dtypes
    return (at_least_fp32(kept_ND) * grad).to(ctx.narrow).to(hidden_dtype), (kept_VD * grad).to(
        weight_dtype
    )


def _runs_triton(tensor: Tensor) -> bool:
    """Return whether Triton's kernels run where the tensor is, or stand in for those that do where
    only bytes are counted.
    """
    return loss_chunks.on_gpu(tensor)


def _rows() -> Any:
    try:
        from flatout.ops import loss_rows
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise MissingPackage(
            "The speedup triton-ce takes the package triton, which is not installed.",
            fix="Install it: `pip install triton`; or leave triton-ce out.",
        ) from error
    return loss_rows


def _arithmetic(hidden_ND: Tensor, weight_VD: Tensor) -> torch.dtype:
    """What products are computed in."""
    device = hidden_ND.device.type
    return (
        torch.get_autocast_dtype(device)
        if torch.is_autocast_enabled(device)
        else torch.promote_types(hidden_ND.dtype, weight_VD.dtype)
    )


def of_logits(
    logits_BTV: Tensor, targets_BT: Tensor, *, softcap: float | None = None, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return what `reference` does, from logits that a model has computed itself.

    Shapes:  logits_BTV (B, T, V); targets_BT (B, T) int64 in [-1, V).
    Returns: as `reference`.
    """
    valid_BT = targets_BT != IGNORED
    return _summed(
        logits_BTV.masked_fill(~valid_BT[..., None], 0.0), targets_BT, softcap, z_loss
    ), valid_BT.sum()


def _summed(logits_BTV: Tensor, targets_BT: Tensor, softcap: float | None, z_loss: float) -> Tensor:
    logits_NV, targets_N = (
        capped(at_least_fp32(logits_BTV).flatten(0, 1), softcap),
        targets_BT.flatten(),
    )
    loss_sum = functional.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        loss_sum = (
            loss_sum
            + z_loss
            * logits_NV.logsumexp(dim=-1).square().masked_fill(targets_N == IGNORED, 0.0).sum()
        )
    return loss_sum


def _valid_only(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the hidden states whose target is ignored: 0 x NaN is NaN in the weight's gradient."""
    if hidden_BTD.shape[:-1] != targets_BT.shape or hidden_BTD.shape[-1] != weight_VD.shape[-1]:
        raise ShapeError(
            f"The loss got hidden states {tuple(hidden_BTD.shape)}, weight {tuple(weight_VD.shape)}, targets {tuple(targets_BT.shape)}.",
            fix="Give one target for each hidden state, and a weight as wide as they are.",
        )
    valid_BT = targets_BT != IGNORED
    return hidden_BTD.masked_fill(~valid_BT[..., None], 0.0), valid_BT
