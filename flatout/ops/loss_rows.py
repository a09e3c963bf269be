"""The loss of ops/loss_chunks.py with the kernel of ops/loss_kernels.py, which writes the gradient
over the logits, row by row.

So a chunk may be twice as long in the same memory; all chunks take turns in one buffer. The
weight's gradient is summed by the products themselves, in fp32. Here too a compiled model calls the
whole loop as one operation.

Letters: N targets, C targets of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flatout.ops import loss_chunks
from flatout.ops import loss_kernels as kernels

LOGITS_AT_ONCE = {"cuda": 2**30, "cpu": 2**24}
"""Logits that are held at once, in number: twice those of ops/loss_chunks.py, which holds their
gradients beside them.
"""
BLOCK = 4_096
"""Logits that a program takes at a time: 8, which are 16 bytes of bfloat16, for each of 512
threads.

Two such programs fit a multiprocessor. All their rows, 27 MB on an H200 for a vocabulary of 50,304,
fit its cache until they are read again.
"""
PER_THREAD = 8
AT_ONCE = 4
"""Blocks that are loaded together: enough bytes under way to keep the memory busy, and registers
for two programs a multiprocessor.
"""
ALIGNED = 16
"""Logits from one row to the next are a multiple of this many, so that products and loads need no
special case for odd vocabularies.
"""


def learned(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients to hidden states and weight, the latter summed in
    fp32.

    Shapes:  as `flatout.ops.loss_chunks.learned`; not in fp64.
    Returns: as `flatout.ops.loss_chunks.learned`.
    """
    if torch.compiler.is_compiling():
        opaque: tuple[Tensor, Tensor, Tensor] = _learned(
            hidden_ND, weight_VD, targets_N, softcap, z_loss
        )
        return opaque
    return _learn(hidden_ND, weight_VD, targets_N, softcap, z_loss)


def scored(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    """Return the summed loss alone, for which the kernel reads the logits once and writes none.

    Shapes:  as `flatout.ops.loss_chunks.learned`; not in fp64.
    """
    if torch.compiler.is_compiling():
        opaque: Tensor = _scored(hidden_ND, weight_VD, targets_N, softcap, z_loss)
        return opaque
    return _score(hidden_ND, weight_VD, targets_N, softcap, z_loss)


def _learn(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    total, grad_hidden_ND, grad_weight_VD = loss_chunks.sums(hidden_ND, weight_VD)
    scale = loss_chunks.SCALES.get(hidden_ND.dtype, 1.0)
    buffer_CV = _buffer(hidden_ND, len(weight_VD))
    for rows, chunk_CD, targets_C in loss_chunks.chunks(
        hidden_ND, targets_N, len(weight_VD), LOGITS_AT_ONCE
    ):
        product_CV = torch.mm(chunk_CD, weight_VD.t(), out=buffer_CV[: len(chunk_CD)])
        total += overwrite(product_CV, targets_C, softcap, z_loss, scale).sum()
        loss_chunks.add_product(
            grad_hidden_ND[rows], product_CV, weight_VD, alpha=1 / scale, beta=0
        )
        loss_chunks.add_product(grad_weight_VD, product_CV.t(), chunk_CD, alpha=1 / scale, beta=1)
    return total, grad_hidden_ND, grad_weight_VD


def _score(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    total = torch.zeros((), dtype=loss_chunks.wide(weight_VD.dtype), device=hidden_ND.device)
    buffer_CV = _buffer(hidden_ND, len(weight_VD))
    for _, chunk_CD, targets_C in loss_chunks.chunks(
        hidden_ND, targets_N, len(weight_VD), LOGITS_AT_ONCE
    ):
        product_CV = torch.mm(chunk_CD, weight_VD.t(), out=buffer_CV[: len(chunk_CD)])
        total += overwrite(product_CV, targets_C, softcap, z_loss, None).sum()
    return total


def _buffer(hidden_ND: Tensor, vocab_size: int) -> Tensor:
    """Return memory for the logits of the longest chunk, its rows aligned."""
    longest = next(
        (
            len(chunk)
            for _, chunk, _ in loss_chunks.chunks(hidden_ND, hidden_ND, vocab_size, LOGITS_AT_ONCE)
        ),
        0,
    )
    return hidden_ND.new_empty(longest, -(-vocab_size // ALIGNED) * ALIGNED)[:, :vocab_size]


def overwrite(
    product_CV: Tensor, targets_C: Tensor, softcap: float | None, z_loss: float, scale: float | None
) -> Tensor:
    """Return each target's loss, 0 where it is ignored, and write its gradient to the logits, times
    `scale`, over these; without a scale write none.

    What lies between two rows is taken for padding, and may be written to.

    Shapes:  product_CV (C, V) in fp32, bf16 or fp16, a row's logits side by side; targets_C (C,).
    Returns: losses_C, fp32.
    Cost:    reads the logits twice, once out of the cache, and writes them once.
    """
    count, vocab_size = product_CV.shape
    losses_C = product_CV.new_empty(count, dtype=torch.float32)
    if isinstance(product_CV, FakeTensor):
        return losses_C
    block, stride = min(BLOCK, 1 << (vocab_size - 1).bit_length()), product_CV.stride(0)
    padded = min(-(-vocab_size // ALIGNED) * ALIGNED, stride)
    with torch.cuda.device_of(product_CV):  # type: ignore[no-untyped-call]
        kernels.losses_and_gradient[(count,)](
            product_CV, targets_C, losses_C,
            Z_LOSS=z_loss, SCALE=scale or 1.0, GRADIENT=scale is not None, CAP=softcap or 0.0,
            VOCAB=vocab_size, PADDED=padded, STRIDE=stride, AT_ONCE=AT_ONCE, BLOCK=block, num_warps=max(block // (32 * PER_THREAD), 1),
        )  # fmt: skip
    return losses_C


@torch.library.custom_op("flatout::loss_learned_by_rows", mutates_args=())
def _learned(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _learn(hidden_ND, weight_VD, targets_N, softcap, z_loss)


@torch.library.custom_op("flatout::loss_by_rows", mutates_args=())
def _scored(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    return _score(hidden_ND, weight_VD, targets_N, softcap, z_loss)


_learned.register_fake(loss_chunks.learned_shapes)
_scored.register_fake(loss_chunks.scored_shape)
