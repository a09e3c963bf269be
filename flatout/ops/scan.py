"""A diagonal linear recurrence with complex eigenvalues: the memory of an eigenstate network.

The second-to-last dimension of a complex tensor contains its real and imaginary parts.

Letters: B rows, T tokens, K eigenstates, E = 2 K: K real parts, then K imaginary parts; C tokens
         per chunk, N chunks, M = B N 2, P powers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatout.errors import ShapeError
from flatout.ops import at_least_fp32, runs_triton, scan_passes, uncompiled

SMALLEST_CARRY = 64
"""States are carried between chunks in chunks of at least this many chunks, whatever their size."""


@uncompiled  # a compiler would unroll the loop, which takes hours for a long sequence
def reference(
    log_decay_K: Tensor,
    angle_K: Tensor,
    drive_BTE: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """Return the state after each token: s[t] = exp(log_decay + i angle) * s[t-1] + drive[t].

    The first state continues from `start_BE`: s[-1] = start. At the first token of a document,
    s[t-1] is zero. This loop is the definition. Every variant must match it, gradients included.

    Shapes:  log_decay_K, angle_K (K,); drive_BTE (B, T, 2 K); doc_ids_BT (B, T) integers; start_BE
             (B, 2 K), zeros when None.
    Returns: states_BTE, fp32 (fp64 for fp64). The last state is states_BTE[:, -1].
    Units:   log_decay is the logarithm of a factor per token, finite and at most 0; angle is in
             radians per token.
    Cost:    8 B T K FLOP; T steps that cannot overlap. chunk_size is for variants that work in
             chunks: no result depends on it.
    Raises:  ShapeError when the shapes do not match.
    Source:  diagonal linear recurrence, Orvieto et al. 2023, arXiv:2303.06349.
    """
    _check(log_decay_K, angle_K, drive_BTE, doc_ids_BT, start_BE)
    drive_BT2K = _pairs(drive_BTE)
    decay_2K = _eigenvalues(log_decay_K, angle_K, drive_BT2K.dtype)
    resets_BT = _resets(doc_ids_BT)
    state_B2K = torch.zeros_like(drive_BT2K[:, 0]) if start_BE is None else _pairs(start_BE)
    states = []
    for t in range(drive_BT2K.shape[1]):
        if resets_BT is not None:
            state_B2K = torch.where(resets_BT[:, t, None, None], 0.0, state_B2K)
        state_B2K = _times(state_B2K, decay_2K) + drive_BT2K[:, t]
        states.append(state_B2K)
    return torch.stack(states, dim=1).flatten(-2)


def chunked(
    log_decay_K: Tensor,
    angle_K: Tensor,
    drive_BTE: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """`reference` in chunks of `chunk_size` tokens, by matmuls with matrices of eigenvalue powers.

    Within a chunk, the state is a product with a triangular matrix of the powers i - j, one real
    and one imaginary matrix per eigenstate, which all chunks share. The states carried between
    chunks follow the same recurrence and are computed the same way. Documents have no such matrix:
    the chunks then advance token by token, in parallel.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    8 C B T K FLOP forward for chunks of C tokens, as much backward; keeps the states.
    Raises:  ShapeError as `reference`.
    """
    _check(log_decay_K, angle_K, drive_BTE, doc_ids_BT, start_BE)
    with torch.autocast(drive_BTE.device.type, enabled=False):  # states are at least fp32
        drive_BT2K = _pairs(drive_BTE)
        if start_BE is not None:
            decay_2K = _eigenvalues(log_decay_K, angle_K, drive_BT2K.dtype)
            before_B2K = _times(_pairs(start_BE), decay_2K)
            drive_BT2K = torch.cat(
                (drive_BT2K[:, :1] + before_B2K[:, None], drive_BT2K[:, 1:]), dim=1
            )
        states_BT2K: Tensor = _Scan.apply(
            log_decay_K, angle_K, drive_BT2K, _resets(doc_ids_BT), chunk_size
        )  # type: ignore[no-untyped-call]
        return states_BT2K.flatten(-2)


def triton(
    log_decay_K: Tensor,
    angle_K: Tensor,
    drive_BTE: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """`reference` in Triton kernels on an NVIDIA GPU, as `flatout.ops.scan_passes` describes.

    A drive in bf16 or fp16 is read without a conversion. On a CPU, where Triton does not run, and
    in fp64 it is `chunked`. Results are the same bits on every run: no program adds to the output
    of another.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`; forward reads the drive twice and writes the states once; backward
             reads the gradient twice and the states once, and writes the drive's gradient once.
             Keeps the states.
    Raises:  ShapeError as `reference`; MissingPackage on a GPU without Triton.
    """
    if drive_BTE.dtype == torch.float64 or not runs_triton(drive_BTE):
        return chunked(
            log_decay_K,
            angle_K,
            drive_BTE,
            doc_ids_BT=doc_ids_BT,
            start_BE=start_BE,
            chunk_size=chunk_size,
        )
    return in_passes(log_decay_K, angle_K, drive_BTE, doc_ids_BT, start_BE, chunk_size)


def in_passes(
    log_decay_K: Tensor,
    angle_K: Tensor,
    drive_BTE: Tensor,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """`triton` where its kernels run. Of tensors without values, only the shapes are computed.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Raises:  ShapeError as `reference`; MissingPackage without Triton.
    """
    _check(log_decay_K, angle_K, drive_BTE, doc_ids_BT, start_BE)
    start_BE = None if start_BE is None else start_BE.float()
    states_BTE: Tensor = scan_passes.states(
        log_decay_K.float(), angle_K.float(), drive_BTE, _resets(doc_ids_BT), start_BE, chunk_size
    )
    return states_BTE


class _Scan(torch.autograd.Function):
    """States starting from zero.

    The gradient of a recurrence is the same recurrence with conjugate eigenvalues, run from the
    last token to the first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        log_decay_K: Tensor,
        angle_K: Tensor,
        drive_BT2K: Tensor,
        resets_BT: Tensor | None,
        chunk_size: int,
    ) -> Tensor:
        """Return the states, which are kept for backward."""
        states_BT2K = _states(log_decay_K, angle_K, drive_BT2K, resets_BT, chunk_size)
        ctx.save_for_backward(log_decay_K, angle_K, states_BT2K, resets_BT)
        ctx.chunk_size = chunk_size
        return states_BT2K

    @staticmethod
    def backward(
        ctx: Any, grad_BT2K: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor, None, None]:
        """Return the gradients of the eigenvalues and of the drive."""
        log_decay_K, angle_K, states_BT2K, resets_BT = ctx.saved_tensors
        with torch.autocast(grad_BT2K.device.type, enabled=False):
            # a state flows to the token after it unless a document starts there
            cuts_BT = None if resets_BT is None else functional.pad(resets_BT[:, 1:], (0, 1))
            drive_grad_BT2K = _states(
                log_decay_K,
                -angle_K,
                grad_BT2K.flip(1),
                None if cuts_BT is None else cuts_BT.flip(1),
                ctx.chunk_size,
            ).flip(1)
            if not any(ctx.needs_input_grad[:2]):
                return None, None, drive_grad_BT2K, None, None
            products = functional.pad(
                _times(drive_grad_BT2K[:, 1:], _conjugate(states_BT2K[:, :-1])), (0, 0, 0, 0, 1, 0)
            )
            if resets_BT is not None:
                products = torch.where(resets_BT[..., None, None], 0.0, products)
            parts = (part.sum(dim=(0, 1)) for part in products.unbind(dim=-2))
            decay_2K = _eigenvalues(log_decay_K, angle_K, states_BT2K.dtype)
            along, across = _times(torch.stack(tuple(parts)), _conjugate(decay_2K)).unbind()
            grads = along.to(log_decay_K.dtype), across.to(angle_K.dtype)
            return *grads, drive_grad_BT2K, None, None


def _resets(doc_ids_BT: Tensor | None) -> Tensor | None:
    """Return whether each token starts a new document."""
    if doc_ids_BT is None:
        return None
    return functional.pad(doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1], (1, 0))


def _states(
    log_decay_K: Tensor,
    angle_K: Tensor,
    drive_BT2K: Tensor,
    resets_BT: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """Return the states starting from zero, without a gradient. `resets_BT` are document starts."""
    if resets_BT is not None:
        return _in_parallel(log_decay_K, angle_K, drive_BT2K, resets_BT)
    return _in_chunks(log_decay_K.double(), angle_K.double(), drive_BT2K, chunk_size)


def _in_chunks(log_decay_K: Tensor, angle_K: Tensor, drive_BT2K: Tensor, chunk_size: int) -> Tensor:
    """Return the states by four matmuls per eigenstate.

    The powers are computed in fp64, since the angle over many tokens is a large number. Eigenstates
    are the first dimension in memory during the computation, so that the matmuls read and write
    contiguous memory.
    """
    rows, tokens, _, num_eigenstates = drive_BT2K.shape
    size = min(chunk_size, tokens)
    chunks = -(-tokens // size)
    exponents = torch.arange(size + 1, device=drive_BT2K.device, dtype=torch.float64)
    powers_K2P = _eigenvalues(
        log_decay_K[:, None] * exponents, angle_K[:, None] * exponents, drive_BT2K.dtype, dim=1
    )
    missing = chunks * size - tokens
    whole_BT2K = functional.pad(drive_BT2K, (0, 0, 0, 0, 0, missing)) if missing else drive_BT2K
    drive_2KMC = whole_BT2K.reshape(-1, 2 * num_eigenstates).t().contiguous()
    drive_2KMC = drive_2KMC.view(2, num_eigenstates, rows * chunks, size)
    real_KCC, imaginary_KCC = (_toeplitz(part_KP[:, :size]) for part_KP in powers_K2P.unbind(dim=1))
    # in place: selective checkpointing keeps what a matmul returns, and would see it change
    states_2KMC, (real_KMC, imaginary_KMC) = torch.empty_like(drive_2KMC), drive_2KMC
    states_2KMC[0].baddbmm_(real_KMC, real_KCC, beta=0).baddbmm_(
        imaginary_KMC, imaginary_KCC, alpha=-1
    )
    states_2KMC[1].baddbmm_(imaginary_KMC, real_KCC, beta=0).baddbmm_(real_KMC, imaginary_KCC)
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
    log_decay_K: Tensor, angle_K: Tensor, drive_BT2K: Tensor, resets_BT: Tensor
) -> Tensor:
    """Return the states of about sqrt(T) chunks that advance token by token in parallel.

    Each chunk then gets the state carried in from the chunks before it. Everything is computed in
    fp64: in a state that lasts ten thousand tokens, the rounding error of an eigenvalue counts ten
    thousand times. At the start of a document the state is replaced by zero. Multiplying it by zero
    would keep a NaN.
    """
    tokens = drive_BT2K.shape[1]
    size = math.isqrt(tokens - 1) + 1
    chunks = -(-tokens // size)

    def cut(tensor: Tensor) -> Tensor:
        if missing := chunks * size - tokens:
            tensor = functional.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, missing))
        return torch.unflatten(tensor, 1, (chunks, size))

    decay_2K = _eigenvalues(log_decay_K.double(), angle_K.double(), torch.float64)
    drive_BNC2K, resets_BNC = cut(drive_BT2K.double()), cut(resets_BT)
    states_BNC2K = torch.empty_like(drive_BNC2K)
    state_BN2K = torch.zeros_like(drive_BNC2K[:, :, 0])
    power_2K = torch.stack((torch.ones_like(decay_2K[0]), torch.zeros_like(decay_2K[0])))
    powers = []
    for i in range(size):
        state_BN2K = torch.where(resets_BNC[:, :, i, None, None], 0.0, state_BN2K)
        state_BN2K = _times(state_BN2K, decay_2K) + drive_BNC2K[:, :, i]
        power_2K = _times(power_2K, decay_2K)
        states_BNC2K[:, :, i] = state_BN2K
        powers.append(power_2K)
    powers_C2K = torch.stack(powers)
    continues_BNC = resets_BNC.cumsum(dim=2) == 0
    state_B2K = torch.zeros_like(state_BN2K[:, 0])
    for n in range(chunks):
        carried_BC2K = _times(state_B2K[:, None], powers_C2K)
        states_BNC2K[:, n] += torch.where(continues_BNC[:, n, :, None, None], carried_BC2K, 0.0)
        state_B2K = states_BNC2K[:, n, -1]
    return states_BNC2K.flatten(1, 2)[:, :tokens].to(drive_BT2K.dtype)


def _pairs(parts: Tensor) -> Tensor:
    """Return K real and K imaginary parts as a complex tensor, in at least fp32.

    Shapes:  parts (..., 2 K).
    Returns: (..., 2, K).
    """
    return at_least_fp32(parts).reshape(*parts.shape[:-1], 2, -1)


def _eigenvalues(log_decay: Tensor, angle: Tensor, dtype: torch.dtype, *, dim: int = -2) -> Tensor:
    """Return exp(log_decay + i angle), with real and imaginary parts along a new dimension.

    It is not computed as a complex power, since 0 ** 0 has no gradient.

    Shapes:  log_decay, angle of one shape.
    """
    log_decay, angle = at_least_fp32(log_decay), at_least_fp32(angle)
    magnitude = log_decay.exp()
    return torch.stack((magnitude * angle.cos(), magnitude * angle.sin()), dim=dim).to(dtype)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of complex tensors.

    Shapes:  left, right (..., 2, K), broadcast.
    """
    a, b = left.unbind(dim=-2)
    c, d = right.unbind(dim=-2)
    return torch.stack((a * c - b * d, a * d + b * c), dim=-2)


def _conjugate(pairs: Tensor) -> Tensor:
    """Return the conjugates of complex numbers.

    Shapes:  pairs (..., 2, K).
    """
    real, imaginary = pairs.unbind(dim=-2)
    return torch.stack((real, -imaginary), dim=-2)


def _check(
    log_decay_K: Tensor,
    angle_K: Tensor,
    drive_BTE: Tensor,
    doc_ids_BT: Tensor | None,
    start_BE: Tensor | None,
) -> None:
    rows, tokens, parts = drive_BTE.shape
    given = [
        None if tensor is None else tuple(tensor.shape)
        for tensor in (log_decay_K, angle_K, drive_BTE, doc_ids_BT, start_BE)
    ]
    if (
        given[0] != given[1]
        or given[0] != (parts // 2,)
        or parts % 2
        or not tokens
        or given[3] not in (None, (rows, tokens))
        or given[4] not in (None, (rows, parts))
    ):
        raise ShapeError(
            "The recurrence got decays {}, angles {}, a drive {}, document ids {} and a start "
            "{}.".format(*given),
            fix="Give decays and angles (K,), a drive (B, T, 2 K) with at least one token, one "
            "document id per token, and a start (B, 2 K).",
        )
