"""The loss of ops/loss_chunks.py by the Triton kernel of ops/loss_kernels.py.

The kernel overwrites each row of logits with its gradient, so that a chunk can be twice as long in
the same memory; all chunks share one buffer. The products accumulate the weight's gradient in fp32.
A compiled model calls the loop over chunks as one custom op.

Letters: N targets, C targets per chunk, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flatout.ops import loss_chunks, triton_kernels

LOGITS_AT_ONCE = {"cuda": 2**30, "cpu": 2**24}
"""How many logits to hold at once: twice those of ops/loss_chunks.py, which stores gradients too.
"""
BLOCK = 4_096
"""Logits that a program processes at a time: 8, or 16 bytes of bfloat16, for each of 512 threads.

Two such programs fit on a multiprocessor. All their rows, 27 MB on an H200 for a vocabulary of
50,304, stay in its cache until they are read again.
"""
PER_THREAD = 8
AT_ONCE = 4
"""Blocks that are loaded together: enough bytes in flight to keep the memory busy, and few enough
registers for two programs per multiprocessor.
"""
ALIGNED = 16
"""The stride between rows of logits is a multiple of this, so that products and loads need no
special case for odd vocabularies.
"""


def loss_and_gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
    is_trained: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients to hidden states and weight.

    Shapes:  as `flatout.ops.loss_chunks.loss_and_gradients`; not in fp64.
    Returns: as `flatout.ops.loss_chunks.loss_and_gradients`.
    """
    if torch.compiler.is_compiling():
        return _gradients_op(hidden_ND, weight_VD, targets_N, softcap, z_loss, is_trained)  # type: ignore[no-any-return]
    return _gradients(hidden_ND, weight_VD, targets_N, softcap, z_loss, is_trained)


def loss_only(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    """Return the summed loss; the kernel reads the logits once and writes no gradient.

    Shapes:  as `flatout.ops.loss_chunks.loss_and_gradients`; not in fp64.
    """
    if torch.compiler.is_compiling():
        return _loss_op(hidden_ND, weight_VD, targets_N, softcap, z_loss)  # type: ignore[no-any-return]
    return _loss(hidden_ND, weight_VD, targets_N, softcap, z_loss)


def _gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float | None,
    z_loss: float,
    is_trained: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    total, grad_hidden_ND, grad_weight_VD = loss_chunks.new_sums(hidden_ND, weight_VD, is_trained)
    scale = loss_chunks.SCALES.get(hidden_ND.dtype, 1.0)
    buffer_CV = _buffer(hidden_ND, len(weight_VD))
    for rows, chunk_CD, targets_C in loss_chunks.chunks(
        hidden_ND, targets_N, len(weight_VD), LOGITS_AT_ONCE
    ):
        grad_CV = torch.mm(chunk_CD, weight_VD.t(), out=buffer_CV[: len(chunk_CD)])
        total += overwrite(grad_CV, targets_C, softcap, z_loss, scale).sum()
        loss_chunks.add_product(grad_hidden_ND[rows], grad_CV, weight_VD, alpha=1 / scale, beta=0)
        if is_trained:
            loss_chunks.add_product(grad_weight_VD, grad_CV.t(), chunk_CD, alpha=1 / scale, beta=1)
    return total, grad_hidden_ND, grad_weight_VD


def _loss(
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
    """Return memory for the logits of the longest chunk, with aligned rows."""
    chunks = loss_chunks.chunks(hidden_ND, hidden_ND, vocab_size, LOGITS_AT_ONCE)
    longest = next((len(chunk) for _, chunk, _ in chunks), 0)
    return hidden_ND.new_empty(longest, -(-vocab_size // ALIGNED) * ALIGNED)[:, :vocab_size]


def overwrite(
    product_CV: Tensor, targets_C: Tensor, softcap: float | None, z_loss: float, scale: float | None
) -> Tensor:
    """Return each target's loss (0 where ignored), and overwrite the logits with their gradient.

    The gradient is multiplied by `scale`; None writes no gradient. The space between two rows
    counts as padding and may be overwritten.

    Shapes:  product_CV (C, V) in fp32, bf16 or fp16, each row contiguous; targets_C (C,).
    Returns: losses_C, fp32.
    Cost:    reads the logits twice, once from the cache, and writes them once.
    """
    count, vocab_size = product_CV.shape
    losses_C = product_CV.new_empty(count, dtype=torch.float32)
    if isinstance(product_CV, FakeTensor):
        return losses_C
    kernels = triton_kernels.load("loss_kernels")
    block, stride = min(BLOCK, 1 << (vocab_size - 1).bit_length()), product_CV.stride(0)
    with torch.cuda.device_of(product_CV):  # type: ignore[no-untyped-call]
        kernels.losses_and_gradient[(count,)](
            product_CV,
            targets_C,
            losses_C,
            Z_LOSS=z_loss,
            SCALE=scale or 1.0,
            GRADIENT=scale is not None,
            CAP=softcap or 0.0,
            VOCAB=vocab_size,
            PADDED=min(-(-vocab_size // ALIGNED) * ALIGNED, stride),
            STRIDE=stride,
            AT_ONCE=AT_ONCE,
            BLOCK=block,
            num_warps=max(block // (32 * PER_THREAD), 1),
        )
    return losses_C


_gradients_op = torch.library.custom_op("flatout::loss_and_gradients_by_rows", mutates_args=())(
    _gradients
)
_gradients_op.register_fake(loss_chunks.gradient_shapes)
_loss_op = torch.library.custom_op("flatout::loss_by_rows", mutates_args=())(_loss)
_loss_op.register_fake(loss_chunks.loss_shape)
