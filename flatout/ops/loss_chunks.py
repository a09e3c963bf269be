"""The loss of ops/cross_entropy.py with logits of a part of the targets at a time, as operations
that a compiled model calls as they are.

Written out inside a compiled model, the parts would be reordered: all their products first, which
is the whole logits again.

Letters: N targets, C targets of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

IGNORED = -1
"""The target that counts for nothing."""
LOGITS_AT_ONCE = {"cuda": 2**29, "cpu": 2**24}
"""Logits that are held at once, in number: enough rows for a product to run at full rate, few
enough to be worth it.
"""
SCALES = {torch.float16: 2.0**12}
"""What the gradients to the logits are multiplied by before they are rounded to a type, and divided
by in fp32 afterwards.

They are made before the scale of the loss is known, and float16 holds nothing below 6e-8. With 2^12
it holds them down to 1.5e-11, in full precision from 1.5e-8. They are at most 1 + 2 z_loss log_sum:
with a z_loss of 1e-4 not even logits of 65,504 bring them beyond its range.
"""


def losses(
    product_CV: Tensor, targets_C: Tensor, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each target's loss, 0 where it is ignored; the logits within their cap, and the
    logarithm of the sum of their exponentials.

    Shapes:  product_CV (C, V) in any type; targets_C (C,).
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
    """Return the sum of the losses, and its gradient to the logits, times `scale`, in their own
    type.

    The target's place is found by comparing, not by writing to it: a compiler then makes the
    gradient in one pass.

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
    """Return the sum of the losses alone.

    Shapes:  product_CV (C, V); targets_C (C,).
    """
    return losses(product_CV, targets_C, softcap, z_loss)[0].sum()


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def learned(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients to hidden states and weight, the latter summed in
    fp32.

    Inside a compiled model what is done to a chunk's logits is compiled too, and the loop over
    chunks stays as it is.

    Shapes:  hidden_ND (N, D) and weight_VD (V, D) of one type, that of the products; targets_N
             (N,).
    Returns: (loss_sum, grad_hidden_ND, grad_weight_VD); grad_hidden_ND in the type of the products,
             in fp32 when that is float16.
    """
    if torch.compiler.is_compiling():
        opaque: tuple[Tensor, Tensor, Tensor] = _learned(
            hidden_ND, weight_VD, targets_N, softcap, z_loss
        )
        return opaque
    return _learn(losses_and_gradient, hidden_ND, weight_VD, targets_N, softcap, z_loss)


def scored(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    """Return the summed loss alone, of which evaluation wants no gradient: a third of the work.

    Shapes:  as `learned`.
    """
    if torch.compiler.is_compiling():
        opaque: Tensor = _scored(hidden_ND, weight_VD, targets_N, softcap, z_loss)
        return opaque
    return _score(loss_sum, hidden_ND, weight_VD, targets_N, softcap, z_loss)


@torch.library.custom_op("flatout::loss_learned_in_chunks", mutates_args=())
def _learned(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _learn(_compiled(losses_and_gradient), hidden_ND, weight_VD, targets_N, softcap, z_loss)


@_learned.register_fake
def learned_shapes(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of the shapes and types that `learned` returns.

    Shapes:  as `learned`.
    """
    summed = wide(weight_VD.dtype)
    return (
        hidden_ND.new_empty((), dtype=summed),
        _gradient_of(hidden_ND),
        weight_VD.new_empty(weight_VD.shape, dtype=summed),
    )


@torch.library.custom_op("flatout::loss_in_chunks", mutates_args=())
def _scored(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    return _score(_compiled(loss_sum), hidden_ND, weight_VD, targets_N, softcap, z_loss)


@_scored.register_fake
def scored_shape(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    """Return a tensor of the shape and type that `scored` returns.

    Shapes:  as `learned`.
    """
    return hidden_ND.new_empty((), dtype=wide(weight_VD.dtype))


def _learn(
    chunk_loss: Callable[..., tuple[Tensor, Tensor]],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:
    total, grad_hidden_ND, grad_weight_VD = sums(hidden_ND, weight_VD)
    scale = SCALES.get(hidden_ND.dtype, 1.0)
    for rows, chunk_CD, targets_C in chunks(hidden_ND, targets_N, len(weight_VD), LOGITS_AT_ONCE):
        loss, grad_CV = chunk_loss(chunk_CD @ weight_VD.t(), targets_C, softcap, z_loss, scale)
        total += loss
        if scale == 1:
            torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            grad_weight_VD += grad_CV.t() @ chunk_CD
        else:
            add_product(grad_hidden_ND[rows], grad_CV, weight_VD, alpha=1 / scale, beta=0)
            add_product(grad_weight_VD, grad_CV.t(), chunk_CD, alpha=1 / scale, beta=1)
        del grad_CV  # or it would lie there while the next product is made
    return total, grad_hidden_ND, grad_weight_VD


def _score(
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


def sums(hidden_ND: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `learned` fills: a loss of 0, a gradient to the hidden states yet to be written,
    and one of 0 to the weight.

    Shapes:  as `learned`.
    """
    grad_weight_VD = torch.zeros(
        weight_VD.shape, dtype=wide(weight_VD.dtype), device=weight_VD.device
    )
    return (
        torch.zeros((), dtype=grad_weight_VD.dtype, device=hidden_ND.device),
        _gradient_of(hidden_ND),
        grad_weight_VD,
    )


def _gradient_of(hidden_ND: Tensor) -> Tensor:
    return torch.empty_like(
        hidden_ND, dtype=wide(hidden_ND.dtype) if hidden_ND.dtype in SCALES else hidden_ND.dtype
    )


def add_product(total: Tensor, left: Tensor, right: Tensor, *, alpha: float, beta: float) -> None:
    """Make `total` beta total + alpha left @ right, in one pass over it; summed and rounded once,
    in its own type, which may be wider.

    A CPU has no such product of narrow factors and widens them first.

    Shapes:  total (M, N); left (M, K) and right (K, N) of one type, that of `total` or narrower.
    Cost:    2 M N K FLOP; reads `total` unless beta is 0, and writes it.
    """
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, alpha=alpha, beta=beta, out=total)
    elif isinstance(left, FakeTensor):
        pass  # torch 2.11 fails to fake the product of the next line, which takes no memory
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, alpha=alpha, beta=beta, out=total)
    else:
        torch.addmm(
            total, left.to(total.dtype), right.to(total.dtype), alpha=alpha, beta=beta, out=total
        )


def chunks(
    hidden_ND: Tensor, targets_N: Tensor, vocab_size: int, logits_at_once: Mapping[str, int]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield chunks of the halves of the targets, or of halves of these, and so on: of few lengths,
    which share what is compiled for them.

    Shapes:  as `learned`; yields (rows, chunk_CD, targets_C).
    """
    most = max(logits_at_once["cuda" if on_gpu(hidden_ND) else "cpu"] // vocab_size, 1)
    size = max(len(targets_N), 1)
    while size > most:
        size = -(-size // 2)
    for start in range(0, len(targets_N), size):
        rows = slice(start, start + size)
        yield rows, hidden_ND[rows], targets_N[rows]


def on_gpu(tensor: Tensor) -> bool:
    """Return whether the tensor is on a GPU. Where only bytes are counted they are those of a GPU:
    that is where memory runs out.

    Shapes:  any.
    """
    return tensor.is_cuda or isinstance(tensor, FakeTensor)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which results of products in `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the logits held within the cap by a tanh; as they are without one.

    Shapes:  any.
    """
    return logits if softcap is None else softcap * (logits / softcap).tanh()
