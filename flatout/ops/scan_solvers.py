"""Solvers of the recurrence in ops/scan.py that start from a state of zero, and complex arithmetic.

The second-to-last dimension of a complex tensor contains its real and imaginary parts.

Letters: B rows, T tokens, K eigenstates, C tokens per chunk, N chunks, M = B N 2, P powers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from flatout.ops import at_least_fp32

SMALLEST_CARRY = 64
"""States are carried between chunks in chunks of at least this many chunks, whatever their size."""


def by_products(
    log_decay: Tensor,
    angle: Tensor,
    drive_BT2K: Tensor,
    resets_BT: Tensor | None,
    *,
    chunk_size: int,
) -> Tensor:
    """Return the states by products with matrices of powers, for eigenvalues that tokens share.

    Shapes:  log_decay, angle (K,) or (B, T, K); drive_BT2K (B, T, 2, K); resets_BT (B, T) bool,
             true where a document starts.
    Returns: states_BT2K.
    """
    if log_decay.dim() > 1 or resets_BT is not None:
        return _in_parallel(log_decay, angle, drive_BT2K, resets_BT)
    return _in_chunks(log_decay.double(), angle.double(), drive_BT2K, chunk_size)


def _in_chunks(log_decay_K: Tensor, angle_K: Tensor, drive_BT2K: Tensor, chunk_size: int) -> Tensor:
    """Return the states by four products per eigenstate.

    The powers are computed in fp64, since the angle over many tokens is a large number. Eigenstates
    are the first dimension in memory during the computation, so that the products read and write
    contiguous memory.
    """
    rows, tokens, _, num_eigenstates = drive_BT2K.shape
    size = min(chunk_size, tokens)
    chunks = -(-tokens // size)
    exponents = torch.arange(size + 1, device=drive_BT2K.device, dtype=torch.float64)
    powers_K2P = eigenvalues(
        log_decay_K[:, None] * exponents, angle_K[:, None] * exponents, drive_BT2K.dtype, dim=1
    )
    missing = chunks * size - tokens
    whole_BT2K = functional.pad(drive_BT2K, (0, 0, 0, 0, 0, missing)) if missing else drive_BT2K
    drive_2KMC = whole_BT2K.reshape(-1, 2 * num_eigenstates).t().contiguous()
    drive_2KMC = drive_2KMC.view(2, num_eigenstates, rows * chunks, size)
    real_KCC, imaginary_KCC = (_toeplitz(part_KP[:, :size]) for part_KP in powers_K2P.unbind(dim=1))
    states_2KMC = drive_2KMC @ real_KCC
    states_2KMC[0].baddbmm_(drive_2KMC[1], imaginary_KCC, alpha=-1)
    states_2KMC[1].baddbmm_(drive_2KMC[0], imaginary_KCC)
    if chunks > 1:
        states_2KBNC = states_2KMC.view(2, num_eigenstates, rows, chunks, size)
        later_2KBNC, ends_2KBN = states_2KBNC[:, :, :, 1:], states_2KBNC[:, :, :, :-1, -1]
        carried_BN2K = _in_chunks(
            log_decay_K * size,
            angle_K * size,
            ends_2KBN.permute(2, 3, 0, 1),
            max(chunk_size, SMALLEST_CARRY),
        )
        real_KBN1, imaginary_KBN1 = carried_BN2K.permute(2, 3, 0, 1)[..., None].unbind()
        real_K11C, imaginary_K11C = powers_K2P[:, :, None, None, 1:].unbind(dim=1)
        later_2KBNC[0].addcmul_(real_KBN1, real_K11C)
        later_2KBNC[0].addcmul_(imaginary_KBN1, imaginary_K11C, value=-1)
        later_2KBNC[1].addcmul_(real_KBN1, imaginary_K11C).addcmul_(imaginary_KBN1, real_K11C)
    states_BT2K = states_2KMC.view(2 * num_eigenstates, -1).t().contiguous()
    return states_BT2K.view(rows, -1, 2, num_eigenstates)[:, :tokens]


def _toeplitz(powers_KC: Tensor) -> Tensor:
    """Return matrices (K, C, C) with the power i - j at [j, i], and zero where that is negative.

    A row of drives times such a matrix gives sums over the past.
    """
    size = powers_KC.shape[1]
    return functional.pad(powers_KC, (size - 1, 0)).unfold(1, size, 1).flip(1)


def _in_parallel(
    log_decay: Tensor, angle: Tensor, drive_BT2K: Tensor, resets_BT: Tensor | None
) -> Tensor:
    """Return the states of about sqrt(T) chunks that advance token by token in parallel.

    Each chunk then gets the state carried in from the chunks before it. Everything is computed in
    fp64: in a state that lasts ten thousand tokens, the rounding error of an eigenvalue counts ten
    thousand times. At the start of a document the state is replaced by zero; multiplying it by zero
    would keep a NaN.
    """
    tokens = drive_BT2K.shape[1]
    size = math.isqrt(tokens - 1) + 1
    chunks = -(-tokens // size)

    def cut(tensor: Tensor) -> Tensor:
        missing = chunks * size - tokens
        if missing:
            zeros = tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])
            tensor = torch.cat((tensor, zeros), dim=1)
        return tensor.reshape(tensor.shape[0], chunks, size, *tensor.shape[2:])

    decay = eigenvalues(log_decay.double(), angle.double(), torch.float64)
    decay_BNC2K = decay.expand(1, chunks, size, -1, -1) if decay.dim() == 2 else cut(decay)
    drive_BNC2K = cut(drive_BT2K.double())
    resets_BNC = (
        torch.zeros_like(drive_BNC2K[..., 0, 0], dtype=torch.bool)
        if resets_BT is None
        else cut(resets_BT)
    )
    states_BNC2K, powers_BNC2K = torch.empty_like(drive_BNC2K), torch.empty_like(decay_BNC2K)
    state_BN2K, power_BN2K = torch.zeros_like(drive_BNC2K[:, :, 0]), _one_like(decay_BNC2K[:, :, 0])
    for i in range(size):
        state_BN2K = torch.where(resets_BNC[:, :, i, None, None], 0.0, state_BN2K)
        state_BN2K = times(state_BN2K, decay_BNC2K[:, :, i]) + drive_BNC2K[:, :, i]
        power_BN2K = times(power_BN2K, decay_BNC2K[:, :, i])
        states_BNC2K[:, :, i], powers_BNC2K[:, :, i] = state_BN2K, power_BN2K
    continues_BNC = resets_BNC.cumsum(dim=2) == 0
    state_B2K = torch.zeros_like(state_BN2K[:, 0])
    for n in range(chunks):
        carried_BC2K = times(state_B2K[:, None], powers_BNC2K[:, n])
        states_BNC2K[:, n] += torch.where(continues_BNC[:, n, :, None, None], carried_BC2K, 0.0)
        state_B2K = states_BNC2K[:, n, -1]
    return states_BNC2K.flatten(1, 2)[:, :tokens].to(drive_BT2K.dtype)


def pairs(parts: Tensor) -> Tensor:
    """Return K real and K imaginary parts as a complex tensor, in at least fp32.

    Shapes:  parts (..., 2 K).
    Returns: (..., 2, K).
    """
    return at_least_fp32(parts).reshape(*parts.shape[:-1], 2, -1)


def eigenvalues(log_decay: Tensor, angle: Tensor, dtype: torch.dtype, *, dim: int = -2) -> Tensor:
    """Return exp(log_decay + i angle), with real and imaginary parts along a new dimension.

    It is not computed as a complex power, since 0 ** 0 has no gradient.

    Shapes:  log_decay, angle of one shape.
    """
    log_decay, angle = at_least_fp32(log_decay), at_least_fp32(angle)
    magnitude = log_decay.exp()
    return torch.stack((magnitude * angle.cos(), magnitude * angle.sin()), dim=dim).to(dtype)


def times(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of complex tensors.

    Shapes:  left, right (..., 2, K), broadcast.
    """
    a, b = left.unbind(dim=-2)
    c, d = right.unbind(dim=-2)
    return torch.stack((a * c - b * d, a * d + b * c), dim=-2)


def _one_like(complex_pairs: Tensor) -> Tensor:
    real = complex_pairs[..., 0, :]
    return torch.stack((torch.ones_like(real), torch.zeros_like(real)), dim=-2)
