"""The loss of a language model, from the last hidden states and the output weight.

In a compiled model the loop over chunks of `chunked` is one custom op. If the compiler traced the
loop, it would move all matmuls to the front and hold all logits in memory again.

Letters: B rows, T tokens, N = B T targets, C targets per chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from flatout.distributed.tensor import Split
from flatout.errors import ShapeError
from flatout.ops import at_least_fp32, linear, product_dtype

IGNORED = -1
"""The target of positions that the loss ignores."""
LOGITS_AT_ONCE = {"cuda": 2**29, "cpu": 2**24}
"""How many logits to hold at once: enough rows for full-rate matmuls, few enough to save memory.
"""
LOGITS_IN_CACHE = 2**20
"""How many logits `bf16` turns into gradients at a time."""
SCALES = {torch.float16: 2.0**12}
"""Factors that scale the gradients of the logits before they are rounded to a dtype. The matmuls
divide by them in fp32.

The gradients are computed before the loss scale is known, and float16 represents nothing below
6e-8. A factor of 2^12 keeps values down to 1.5e-11, in full precision from 1.5e-8. The gradients
are at most 1 + 2 z_loss log_sum: with a z_loss of 1e-4 not even logits of 65,504 overflow.
"""


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
    affects neither the loss nor a gradient. With `softcap` c the logits are c tanh(logits / c).
    `z_loss` z adds z times the squared log of the softmax denominator for each target. This code,
    with all logits in memory and plain functions, is the definition. Every variant must match it,
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
    logits_BTV = capped(at_least_fp32(logits_of(hidden_BTD, weight_VD)), softcap)
    return _summed_losses(logits_BTV, targets_BT, z_loss)[0], valid_BT.sum()


def logits_of(hidden: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the hidden states, widened to the dtype of the output weight, times that weight.

    Shapes:  hidden (..., D); weight_VD (V, D).
    Returns: (..., V).
    """
    return functional.linear(hidden.to(weight_VD.dtype), weight_VD)


def _summed_losses(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the targets, and the logarithm of each softmax denominator."""
    log_sum = logits.logsumexp(dim=-1)
    losses = (
        log_sum
        - logits.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        + z_loss * log_sum.square()
    )
    return losses.masked_fill(targets == IGNORED, 0.0).sum(), log_sum


def _variant(summed: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the variant of `reference` that sums the loss with a function of its arguments."""

    def loss(
        hidden_BTD: Tensor,
        weight_VD: Tensor,
        targets_BT: Tensor,
        *,
        softcap: float | None = None,
        z_loss: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
        return summed(hidden_BTD, weight_VD, targets_BT, softcap, z_loss), valid_BT.sum()

    return loss


def _with_all_logits(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda hidden_BTD, weight_VD, *others: _summed(product(hidden_BTD, weight_VD), *others)


def _with_chunks(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    softcap: float | None,
    z_loss: float,
    loop: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
) -> Tensor:
    options = (softcap, z_loss, loop)
    given: Any = (hidden_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), *options)
    if torch.is_grad_enabled() and (hidden_BTD.requires_grad or weight_VD.requires_grad):
        return _Chunked.apply(*given, weight_VD.requires_grad)  # type: ignore[no-any-return, no-untyped-call]
    return _in_chunks(*given, False, False)[0]


def sharded(
    hidden_BTD: Tensor,
    weight_PD: Tensor,
    targets_BT: Tensor,
    *,
    split: Split,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return this rank's share of `reference`, from its P rows of an output weight.

    The sums over all ranks are the result of `reference`. Every rank is given all tokens, and
    returns the gradients that its part of the vocabulary contributes. It is `chunked` otherwise.

    Shapes:  as `reference`, with weight_PD (P, D).
    Returns: as `reference`: an equal part of the loss, and the number of this rank's targets.
    Cost:    as `chunked`, divided among the ranks, and two all-reduces of a few numbers per target.
    """
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_PD, targets_BT)
    loop = partial(_loop, partial(_of_shard, split))
    loss_sum = _with_chunks(hidden_BTD, weight_PD, targets_BT, softcap, z_loss, loop)
    ((start, end),) = split.spans(targets_BT.shape[1])
    return loss_sum, valid_BT[:, start:end].sum()


def _in_bf16(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *others: Any,
    most: int | None = None,
) -> Tensor:
    if not linear.bf16_fits(hidden_BTD, weight_VD):
        return _summed(logits_of(hidden_BTD, weight_VD), targets_BT, *others)
    given: Any = (hidden_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), *others)
    has_gradients = torch.is_grad_enabled() and (
        hidden_BTD.requires_grad or weight_VD.requires_grad
    )
    return _OverRows.apply(*given, has_gradients, most)  # type: ignore[no-any-return, no-untyped-call]


fused = _variant(_with_all_logits(logits_of))
"""`reference` through torch's cross_entropy, which gathers and sums in one pass over the logits."""
onednn = _variant(_with_all_logits(linear.onednn))
"""`fused` with the matmuls of `flatout.ops.linear.onednn`, for fp32 on a CPU."""
bf16 = _variant(_in_bf16)
"""`reference` with the matmuls of `flatout.ops.linear.bf16`, for CPUs with bf16 matmuls.

All logits exist in bf16 only. Their gradients replace them a few rows at a time, in fp32 in the
cache, while the loss is computed. Where `linear.bf16` computes in fp32, this is `fused`.
"""
chunked = _variant(_with_chunks)
"""`reference` in chunks of a few thousand targets, so that all logits never exist at once.

The gradients are computed together with the loss, before backward needs them. A weight that is not
trained costs a third less. In a compiled model the work on the logits of a chunk is compiled too.
The loop is not traced.

Cost:    6 B T D V FLOP, all of it forward; keeps the gradients of hidden states and weight, the
         latter in fp32.
"""


@cache
def in_chunks(at_once: int, most: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `chunked` with at most `at_once` logits, for `most` chunks of the targets alone.

    By the second chunk, everything that needs memory exists.
    """
    loop = partial(_loop, _of_chunk, at_once=at_once, most=most)
    return _variant(partial(_with_chunks, loop=loop))


@cache
def of_few_rows(most: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `bf16` that handles `most` of its rows alone, which need as much memory as all."""
    return _variant(partial(_in_bf16, most=most))


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


class _Chunked(torch.autograd.Function):
    """The summed loss, with gradients that are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        softcap: float | None,
        z_loss: float,
        loop: Callable[..., tuple[Tensor, Tensor, Tensor]] | None,
        is_trained: bool,
    ) -> Tensor:
        """Return the loss. Both gradients are kept for backward, unless the weight is frozen."""
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, product_dtype(hidden_ND, weight_VD))
        ctx.is_trained = is_trained
        given = (hidden_ND, weight_VD, targets_N, softcap, z_loss, loop)
        loss_sum, *gradients = _in_chunks(*given, True, is_trained)
        ctx.save_for_backward(*gradients)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, *tuple[None, ...]]:
        """Return the kept gradients times the gradient of the loss, multiplied in at least fp32.

        The gradient of the hidden states is rounded to the dtype of their matmul with the weight,
        so that values beyond the range of float16 become infinite.
        """
        grad_ND, grad_VD = ctx.saved_tensors
        hidden_dtype, weight_dtype, dtype = ctx.dtypes
        grad_ND = (at_least_fp32(grad_ND) * grad).to(dtype).to(hidden_dtype)
        summed_VD = (grad_VD * grad).to(weight_dtype) if ctx.is_trained else None
        return grad_ND, summed_VD, None, None, None, None, None


class _OverRows(torch.autograd.Function):
    """The summed loss from logits in bf16, which become their gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        softcap: float | None,
        z_loss: float,
        has_gradients: bool,
        most: int | None,
    ) -> Tensor:
        """Return the loss. The gradients of the logits are kept for backward."""
        narrow_VD = weight_VD.bfloat16()
        given = (hidden_ND.bfloat16(), narrow_VD, targets_N, softcap, z_loss, has_gradients, most)
        over_rows: Any = _opaque_rows if torch.compiler.is_compiling() else _over_rows
        loss_sum, grad_NV = over_rows(*given)
        if has_gradients:
            ctx.save_for_backward(hidden_ND, narrow_VD, grad_NV)
        return loss_sum  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, *tuple[None, ...]]:
        """Return both gradients, each of one matmul. `grad` is multiplied in fp32."""
        hidden_ND, narrow_VD, grad_NV = ctx.saved_tensors
        grad_ND = grad_VD = None
        if ctx.needs_input_grad[0]:
            grad_ND = ((grad_NV @ narrow_VD).float() * grad).to(hidden_ND.dtype)
        if ctx.needs_input_grad[1]:
            scaled_ND = (hidden_ND.float() * grad).bfloat16()
            grad_VD = functional.linear(grad_NV.t(), scaled_ND.t()).float()
        return grad_ND, grad_VD, None, None, None, None, None


def _over_rows(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
    has_gradients: bool,
    most: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the gradients of the logits if they are wanted.

    Rows whose target is ignored have hidden states of 0, so their gradients reach no weight.
    """
    logits_NV = functional.linear(hidden_ND, weight_VD)
    total = logits_NV.new_zeros((), dtype=torch.float32)
    for _, rows_CV, targets_C in _chunks(
        logits_NV, targets_N, len(weight_VD), LOGITS_IN_CACHE, most
    ):
        if softcap is not None or z_loss:
            scale = 1.0 if has_gradients else None
            loss, grad_CV = _of_chunk(rows_CV, targets_C, softcap, z_loss, scale)
        else:
            grad_CV = rows_CV.log_softmax(dim=1, dtype=torch.float32)
            target_C1 = targets_C.clamp_min(0)[:, None]
            losses_C = grad_CV.gather(1, target_C1)[:, 0].neg()
            loss = losses_C.masked_fill(targets_C == IGNORED, 0.0).sum()
            if has_gradients:
                grad_CV.exp_().scatter_add_(1, target_C1, grad_CV.new_full(target_C1.shape, -1.0))
        total += loss
        if has_gradients and grad_CV is not None:
            rows_CV.copy_(grad_CV)
    return total, logits_NV if has_gradients else logits_NV.new_empty(0)


_opaque_rows = torch.library.custom_op("flatout::loss_over_rows", mutates_args=())(_over_rows)


@_opaque_rows.register_fake
def _shapes_over_rows(
    hidden_ND: Tensor, weight_VD: Tensor, _targets: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    shape = (len(hidden_ND), len(weight_VD)) if others[-2] else (0,)
    return hidden_ND.new_empty((), dtype=torch.float32), hidden_ND.new_empty(shape)


def _in_chunks(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
    loop: Any,
    *others: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `_loop`, or another `loop`, with matmuls in autocast's dtype."""
    dtype = product_dtype(hidden_ND, weight_VD)
    if loop is None:
        loop = _opaque_loop if torch.compiler.is_compiling() else partial(_loop, _of_chunk)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        results: tuple[Tensor, Tensor, Tensor] = loop(
            hidden_ND.to(dtype), weight_VD.to(dtype), targets_N, softcap, z_loss, *others
        )
    return results


def _of_chunk(
    product_CV: Tensor,
    targets_C: Tensor,
    softcap: float | None,
    z_loss: float,
    scale: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss, and the logits' gradient times `scale`, in their dtype.

    The position of the target is found by comparison instead of an indexed write, so that a
    compiler computes the gradient in one pass.
    """
    capped_CV = capped(at_least_fp32(product_CV), softcap)
    loss_sum, log_sum_C = _summed_losses(capped_CV, targets_C, z_loss)
    if scale is None:
        return loss_sum, None
    factor_C = (1 + 2 * z_loss * log_sum_C).masked_fill(targets_C == IGNORED, 0.0)
    grad_CV = _of_logits(capped_CV, log_sum_C, factor_C, targets_C, softcap, scale)
    return loss_sum, grad_CV.to(product_CV.dtype)


def _of_logits(
    capped_CV: Tensor,
    log_sum_C: Tensor,
    factor_C: Tensor,
    targets_C: Tensor,
    softcap: float | None,
    scale: float,
) -> Tensor:
    """Return the gradient of the logits times `scale`."""
    grad_CV = (capped_CV - log_sum_C[:, None]).exp() * factor_C[:, None]
    is_target_CV = targets_C[:, None] == torch.arange(capped_CV.shape[1], device=capped_CV.device)
    grad_CV.add_(is_target_CV, alpha=-1)
    if softcap is not None:
        grad_CV *= 1 - (capped_CV / softcap).square()
    if scale != 1:
        grad_CV *= scale
    return grad_CV


def _of_shard(
    split: Split,
    product_CP: Tensor,
    targets_C: Tensor,
    softcap: float | None,
    z_loss: float,
    scale: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Return an equal part of the loss, and the gradient of this rank's logits times `scale`."""
    capped_CP = capped(at_least_fp32(product_CP), softcap)
    own_C = targets_C - split.rank * product_CP.shape[1]
    is_own_C = (own_C >= 0) & (own_C < product_CP.shape[1]) & (targets_C != IGNORED)
    target_C = capped_CP.gather(1, own_C.where(is_own_C, 0)[:, None])[:, 0] * is_own_C
    largest_C = split.added(capped_CP.amax(dim=1), dist.ReduceOp.MAX)
    sums_C = (capped_CP - largest_C[:, None]).exp().sum(dim=1)
    sums_C, target_C = split.added(torch.stack((sums_C, target_C)))
    log_sum_C = largest_C + sums_C.log()
    losses_C = log_sum_C - target_C + z_loss * log_sum_C.square()
    valid_C = targets_C != IGNORED
    loss = losses_C.where(valid_C, 0.0).sum() / split.size
    if scale is None:
        return loss, None
    factor_C = (1 + 2 * z_loss * log_sum_C) * valid_C
    own_C = own_C.where(is_own_C, IGNORED)
    grad_CP = _of_logits(capped_CP, log_sum_C, factor_C, own_C, softcap, scale)
    return loss, grad_CP.to(product_CP.dtype)


def _loop(
    of_chunk: Callable[..., tuple[Tensor, Tensor | None]],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
    has_gradients: bool,
    is_trained: bool,
    **limits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and the gradients of hidden states and weight. `limits` are for `_chunks`.

    A gradient that is not wanted is an empty tensor. That of the hidden states has the dtype of the
    products, or fp32 when that is float16. That of the weight is accumulated in fp32.
    """
    total, grad_hidden_ND, grad_weight_VD = _results(
        hidden_ND, weight_VD, has_gradients, is_trained
    )
    scale = SCALES.get(hidden_ND.dtype, 1.0)
    for rows, chunk_CD, targets_C in _chunks(hidden_ND, targets_N, len(weight_VD), **limits):
        loss, grad_CV = of_chunk(
            chunk_CD @ weight_VD.t(), targets_C, softcap, z_loss, scale if has_gradients else None
        )
        total += loss
        if grad_CV is None:
            continue
        _add_product(grad_hidden_ND[rows], grad_CV, weight_VD, alpha=1 / scale, beta=0)
        if is_trained:
            _add_product(grad_weight_VD, grad_CV.t(), chunk_CD, alpha=1 / scale, beta=1)
        del grad_CV  # frees its memory before the next product is computed
    return total, grad_hidden_ND, grad_weight_VD


@torch.library.custom_op("flatout::loss_in_chunks", mutates_args=())
def _opaque_loop(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
    has_gradients: bool,
    is_trained: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _loop(
        _compiled(), hidden_ND, weight_VD, targets_N, softcap, z_loss, has_gradients, is_trained
    )


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor | None]]:
    return torch.compile(_of_chunk, dynamic=False)


@_opaque_loop.register_fake
def _results(hidden_ND: Tensor, weight_VD: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return a loss of 0, an uninitialised hidden gradient, and a weight gradient of 0."""
    has_gradients, is_trained = others[-2:]
    dtype, summed = hidden_ND.dtype, torch.promote_types(weight_VD.dtype, torch.float32)
    return (
        hidden_ND.new_zeros((), dtype=summed),
        hidden_ND.new_empty(
            hidden_ND.shape if has_gradients else (0,), dtype=summed if dtype in SCALES else dtype
        ),
        weight_VD.new_zeros(weight_VD.shape if is_trained else (0,), dtype=summed),
    )


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, alpha: float, beta: float) -> None:
    """Set `total`, of the factors' dtype or fp32, to beta total + alpha left @ right.

    The sum is rounded once. CPUs have no such matmul of narrower factors: float16 is widened first,
    and a product of bf16, which they multiply fast, is rounded before it is added.
    """
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, alpha=alpha, beta=beta, out=total)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, alpha=alpha, beta=beta, out=total)
    elif left.dtype == torch.bfloat16:  # never scaled, and only the weight's sum is wider
        total += left @ right
    else:
        torch.addmm(total, left.float(), right.float(), alpha=alpha, beta=beta, out=total)


def _chunks(
    hidden_ND: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    at_once: int | None = None,
    most: int | None = None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield equal chunks of the targets, which are halved until the logits of a chunk fit.

    This keeps the number of different lengths small, so that chunks share compiled code. At most
    `most` are yielded.
    """
    at_once = at_once or LOGITS_AT_ONCE["cuda" if hidden_ND.is_cuda else "cpu"]
    size = max(len(targets_N), 1)
    while size > max(at_once // vocab_size, 1):
        size = -(-size // 2)
    for start in range(0, len(targets_N), size)[:most]:
        rows = slice(start, start + size)
        yield rows, hidden_ND[rows], targets_N[rows]


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


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the logits, limited by a tanh to plus or minus the cap if there is one.

    Shapes:  any.
    """
    return logits if softcap is None else softcap * (logits / softcap).tanh()
