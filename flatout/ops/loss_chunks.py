"""The loss of ops/cross_entropy.py, computed for one chunk of targets at a time.

In a compiled model each loop over chunks is one custom op. If the compiler traced the loop, it
would move all products to the front and hold all logits in memory again.

Letters: N targets, C targets per chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

IGNORED = -1
"""The target of positions that the loss ignores."""
LOGITS_AT_ONCE = {"cuda": 2**29, "cpu": 2**24}
"""How many logits to hold at once: enough rows for full-rate products, few enough to save memory.
"""
FAKE_CHUNKS = 3
"""Chunks of a loss on fake tensors: by the second, everything that a chunk holds exists."""
SCALES = {torch.float16: 2.0**12}
"""Factors that scale the gradients of the logits before they are rounded to a dtype; the products
divide by them in fp32.

The gradients are computed before the loss scale is known, and float16 represents nothing below
6e-8. A factor of 2^12 keeps values down to 1.5e-11, in full precision from 1.5e-8. The gradients
are at most 1 + 2 z_loss log_sum: with a z_loss of 1e-4 not even logits of 65,504 overflow.
"""


def losses(
    product_CV: Tensor, targets_C: Tensor, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each target's loss (0 where ignored), the capped logits, and their logsumexp.

    Shapes:  product_CV (C, V) in any dtype; targets_C (C,).
    Returns: (losses_C, capped_CV, log_sum_C), at least fp32.
    """
    capped_CV = capped(product_CV.to(wide(product_CV.dtype)), softcap)
    log_sum_C = capped_CV.logsumexp(dim=-1)
    losses_C = (
        log_sum_C
        - capped_CV.gather(-1, targets_C.clamp_min(0)[:, None])[:, 0]
        + z_loss * log_sum_C.square()
    )
    return losses_C.masked_fill(targets_C == IGNORED, 0.0), capped_CV, log_sum_C


def losses_and_gradient(
    product_CV: Tensor, targets_C: Tensor, softcap: float | None, z_loss: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, and its gradient to the logits times `scale`, in their dtype.

    The position of the target is found by comparison instead of an indexed write, so that a
    compiler computes the gradient in one pass.

    Shapes:  product_CV (C, V); targets_C (C,).
    Returns: (loss_sum, grad_CV).
    """
    losses_C, capped_CV, log_sum_C = losses(product_CV, targets_C, softcap, z_loss)
    factor_C = (1 + 2 * z_loss * log_sum_C).masked_fill(targets_C == IGNORED, 0.0)
    grad_CV = (capped_CV - log_sum_C[:, None]).exp() * factor_C[:, None]
    is_target_CV = targets_C[:, None] == torch.arange(product_CV.shape[1], device=product_CV.device)
    grad_CV.add_(is_target_CV, alpha=-1)
    if softcap is not None:
        grad_CV *= 1 - (capped_CV / softcap).square()
    if scale != 1:
        grad_CV *= scale
    return losses_C.sum(), grad_CV.to(product_CV.dtype)


def loss_sum(product_CV: Tensor, targets_C: Tensor, softcap: float | None, z_loss: float) -> Tensor:
    """Return the sum of the losses.

    Shapes:  product_CV (C, V); targets_C (C,).
    """
    return losses(product_CV, targets_C, softcap, z_loss)[0].sum()


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def loss_and_gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
    is_trained: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients to hidden states and weight.

    A weight that is not trained costs a third less: its gradient is an empty tensor. In a compiled
    model the work on the logits of a chunk is compiled too; the loop is not traced.

    Shapes:  hidden_ND (N, D) and weight_VD (V, D) of one dtype, that of the products; targets_N
             (N,).
    Returns: (loss_sum, grad_hidden_ND, grad_weight_VD); grad_hidden_ND in the dtype of the
             products, in fp32 when that is float16; grad_weight_VD is accumulated in fp32.
    """
    if torch.compiler.is_compiling():
        return _gradients_op(hidden_ND, weight_VD, targets_N, softcap, z_loss, is_trained)  # type: ignore[no-any-return]
    return _gradients(
        losses_and_gradient, hidden_ND, weight_VD, targets_N, softcap, z_loss, is_trained
    )


def loss_only(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    """Return the summed loss without gradients, for evaluation: a third of the work.

    Shapes:  as `loss_and_gradients`.
    """
    if torch.compiler.is_compiling():
        return _loss_op(hidden_ND, weight_VD, targets_N, softcap, z_loss)  # type: ignore[no-any-return]
    return _loss(loss_sum, hidden_ND, weight_VD, targets_N, softcap, z_loss)


@torch.library.custom_op("flatout::loss_and_gradients_in_chunks", mutates_args=())
def _gradients_op(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
    is_trained: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    chunk_loss = _compiled(losses_and_gradient)
    return _gradients(chunk_loss, hidden_ND, weight_VD, targets_N, softcap, z_loss, is_trained)


@_gradients_op.register_fake
def gradient_shapes(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
    is_trained: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors with the shapes and dtypes that `loss_and_gradients` returns.

    Shapes:  as `loss_and_gradients`.
    """
    summed = wide(weight_VD.dtype)
    return (
        hidden_ND.new_empty((), dtype=summed),
        _gradient_of(hidden_ND),
        weight_VD.new_empty(weight_VD.shape if is_trained else (0,), dtype=summed),
    )


@torch.library.custom_op("flatout::loss_in_chunks", mutates_args=())
def _loss_op(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    return _loss(_compiled(loss_sum), hidden_ND, weight_VD, targets_N, softcap, z_loss)


@_loss_op.register_fake
def loss_shape(hidden_ND: Tensor, weight_VD: Tensor, *_: object) -> Tensor:
    """Return a tensor with the shape and dtype that `loss_only` returns.

    Shapes:  as `loss_and_gradients`.
    """
    return hidden_ND.new_empty((), dtype=wide(weight_VD.dtype))


def _gradients(
    chunk_loss: Callable[..., tuple[Tensor, Tensor]],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
    is_trained: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    total, grad_hidden_ND, grad_weight_VD = new_sums(hidden_ND, weight_VD, is_trained)
    scale = SCALES.get(hidden_ND.dtype, 1.0)
    for rows, chunk_CD, targets_C in chunks(hidden_ND, targets_N, len(weight_VD), LOGITS_AT_ONCE):
        loss, grad_CV = chunk_loss(chunk_CD @ weight_VD.t(), targets_C, softcap, z_loss, scale)
        total += loss
        if scale == 1:
            torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            if is_trained:
                grad_weight_VD += grad_CV.t() @ chunk_CD
        else:
            add_product(grad_hidden_ND[rows], grad_CV, weight_VD, alpha=1 / scale, beta=0)
            if is_trained:
                add_product(grad_weight_VD, grad_CV.t(), chunk_CD, alpha=1 / scale, beta=1)
        del grad_CV  # frees its memory before the next product is computed
    return total, grad_hidden_ND, grad_weight_VD


def _loss(
    chunk_loss: Callable[..., Tensor],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    total = torch.zeros((), dtype=wide(weight_VD.dtype), device=hidden_ND.device)
    for _, chunk_CD, targets_C in chunks(hidden_ND, targets_N, len(weight_VD), LOGITS_AT_ONCE):
        total += chunk_loss(chunk_CD @ weight_VD.t(), targets_C, softcap, z_loss)
    return total


def new_sums(
    hidden_ND: Tensor, weight_VD: Tensor, is_trained: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a loss of 0, an uninitialised hidden gradient, and a weight gradient of 0.

    Shapes:  as `loss_and_gradients`.
    """
    summed, device = wide(weight_VD.dtype), hidden_ND.device
    shape = weight_VD.shape if is_trained else (0,)
    grad_weight_VD = torch.zeros(shape, dtype=summed, device=weight_VD.device)
    return torch.zeros((), dtype=summed, device=device), _gradient_of(hidden_ND), grad_weight_VD


def _gradient_of(hidden_ND: Tensor) -> Tensor:
    dtype = hidden_ND.dtype
    return torch.empty_like(hidden_ND, dtype=wide(dtype) if dtype in SCALES else dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, alpha: float, beta: float) -> None:
    """Set `total` to beta total + alpha left @ right in one pass, accumulated in its own dtype.

    That dtype may be wider than the dtype of the factors; the result is rounded once. CPUs have no
    such product, so narrow factors are widened first.

    Shapes:  total (M, N); left (M, K) and right (K, N) of one dtype, that of `total` or narrower.
    Cost:    2 M N K FLOP; reads `total` unless beta is 0, and writes it.
    """
    dtype = total.dtype
    if dtype == left.dtype:
        torch.addmm(total, left, right, alpha=alpha, beta=beta, out=total)
    elif isinstance(left, FakeTensor):
        pass  # torch 2.11 cannot fake the product below, which allocates no memory
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=dtype, alpha=alpha, beta=beta, out=total)
    else:
        torch.addmm(total, left.to(dtype), right.to(dtype), alpha=alpha, beta=beta, out=total)


def chunks(
    hidden_ND: Tensor, targets_N: Tensor, vocab_size: int, logits_at_once: Mapping[str, int]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield equal chunks of the targets, which are halved until the logits of a chunk fit.

    This keeps the number of different lengths small, so that chunks share compiled code. Of fake
    tensors only a few chunks are yielded: all need the same memory.

    Shapes:  as `loss_and_gradients`; yields (rows, chunk_CD, targets_C).
    """
    limit = max(logits_at_once["cuda" if on_gpu(hidden_ND) else "cpu"] // vocab_size, 1)
    size = max(len(targets_N), 1)
    while size > limit:
        size = -(-size // 2)
    starts = range(0, len(targets_N), size)
    for start in starts[:FAKE_CHUNKS] if isinstance(hidden_ND, FakeTensor) else starts:
        rows = slice(start, start + size)
        yield rows, hidden_ND[rows], targets_N[rows]


def on_gpu(tensor: Tensor) -> bool:
    """Return whether the tensor is on a GPU, or fake and estimates the memory of a GPU run.

    Shapes:  any.
    """
    if isinstance(tensor, FakeTensor):
        return getattr(tensor.fake_mode, "stands_for", "cuda") == "cuda"
    return tensor.is_cuda


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of `dtype` are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the logits, limited by a tanh to plus or minus the cap if there is one.

    Shapes:  any.
    """
    return logits if softcap is None else softcap * (logits / softcap).tanh()
