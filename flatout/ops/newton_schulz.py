"""Newton-Schulz iterations: nearly orthogonal matrices from matmuls alone.

Letters: N matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.ops import at_least_fp32, linear

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, XX'X and XX'XX'X: steep at 0, so that small singular values grow fast. The
values end up near 1 without converging to it.
"""
ITERATIONS = 5
SMALLEST_NORM = 1e-12


def reference(matrices_NRC: Tensor) -> Tensor:
    """Return each matrix with its singular values brought near 1 (about 0.7 to 1.2).

    The singular vectors are kept. Starting from X divided by its norm, each of five iterations sets
    X to aX + (bG + cGG)X with G = XX', one matrix after the other. This is the definition.

    Shapes:  matrices_NRC (N, R, C); R <= C is cheaper.
    Returns: (N, R, C) in bfloat16 on CUDA, else in the input's dtype and at least float32; zero
             matrices stay zero.
    Cost:    5 N (4 R R C + 2 R R R) FLOP, in 15 N matmuls.
    Source:  Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    a, b, c = QUINTIC
    finished = []
    for matrix_RC in _normalised(matrices_NRC):
        for _ in range(ITERATIONS):
            gram_RR = matrix_RC @ matrix_RC.T
            matrix_RC = a * matrix_RC + (b * gram_RR + c * (gram_RR @ gram_RR)) @ matrix_RC
        finished.append(matrix_RC)
    return torch.stack(finished)


def batched(matrices_NRC: Tensor) -> Tensor:
    """`reference` on all matrices at once: a matmul of the stack takes one launch instead of N.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`, in 15 batched matmuls.
    """
    return _iterated(_normalised(matrices_NRC))


def onednn(matrices_NRC: Tensor) -> Tensor:
    """`reference` with the matmuls of `flatout.ops.linear.onednn_product`, for fp32 on a CPU.

    oneDNN computes left @ right'. G is symmetric, so no copy is needed.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`; aX is part of the matmul, since a is added to the factor's diagonal.
    """
    stack_NRC = _normalised(matrices_NRC)
    if not linear.onednn_fits(stack_NRC, stack_NRC):
        return batched(matrices_NRC)
    a, b, c = QUINTIC
    for result_RC in stack_NRC:
        matrix_RC = result_RC
        for _ in range(ITERATIONS):
            gram_RR = linear.onednn_product(matrix_RC, matrix_RC)
            factor_RR = linear.onednn_product(gram_RR, gram_RR).mul_(c).add_(gram_RR, alpha=b)
            factor_RR.diagonal().add_(a)
            matrix_RC = linear.onednn_product(factor_RR, matrix_RC.T)
        result_RC.copy_(matrix_RC)
    return stack_NRC


def bf16(matrices_NRC: Tensor) -> Tensor:
    """`batched` in bfloat16 as on a GPU, for CPUs with bf16 matmuls.

    Shapes:  as `reference`.
    Returns: (N, R, C) in bfloat16.
    Cost:    as `batched`, at several times the rate.
    """
    return _iterated(_normalised(matrices_NRC).bfloat16())


def _normalised(matrices_NRC: Tensor) -> Tensor:
    """Return the matrices divided by their norms, in the dtype of the iterations."""
    wide_NRC = at_least_fp32(matrices_NRC)
    norms_N11 = torch.linalg.matrix_norm(wide_NRC, keepdim=True).clamp(min=SMALLEST_NORM)
    scaled_NRC: Tensor = wide_NRC / norms_N11
    return scaled_NRC.bfloat16() if scaled_NRC.is_cuda else scaled_NRC


def _iterated(stack_NRC: Tensor) -> Tensor:
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram_NRR = stack_NRC @ stack_NRC.mT
        factor_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        stack_NRC = torch.baddbmm(stack_NRC, factor_NRR, stack_NRC, beta=a)
    return stack_NRC
