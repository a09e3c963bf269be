"""A diagonal linear recurrence with complex eigenvalues: the memory of an eigenstate network.

Letters: B rows, T tokens, K eigenstates, E = 2 K: K real parts, then K imaginary ones; C tokens of
         a chunk, N chunks, M = B N 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatout.errors import MissingPackage, ShapeError
from flatout.ops import at_least_fp32

Solve = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(log_decay, angle, drive_BT2K, resets_BT) -> states_BT2K from a state of zero on; autograd does
not look inside.
"""

SMALLEST_CARRY = 64
"""States are carried from chunk to chunk in chunks of at least so many chunks, however small the
chunks are.
"""


def reference(
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """State after each token: s[t] = exp(log_decay + i angle) * s[t-1] + drive[t], with s[-1] =
    start.

    Where the document changes, s[t-1] counts as zero. Eigenvalues are one for all tokens, or each
    token has its own (selective). This loop is the definition. Every variant must match it,
    gradients included.

    Shapes:  log_decay, angle (K,), or both (B, T, K); drive_BTE (B, T, 2 K); doc_ids_BT (B, T)
             integers; start_BE (B, 2 K), zeros when None.
    Returns: states_BTE, fp32 (fp64 for fp64); the last state is states_BTE[:, -1].
    Units:   log_decay is the logarithm of a factor a token, finite and at most 0; angle is in
             radians a token.
    Cost:    8 B T K FLOP; T steps that cannot overlap. chunk_size is for variants that work in
             chunks: no result depends on it.
    Raises:  ShapeError when the shapes do not fit, or chunk_size is below 1.
    Source:  diagonal linear recurrence, Orvieto et al. 2023, arXiv:2303.06349.
    """
    _check(log_decay, angle, drive_BTE, doc_ids_BT, start_BE, chunk_size)
    states_BTE: Tensor = _token_by_token(log_decay, angle, drive_BTE, doc_ids_BT, start_BE)
    return states_BTE


def _loop(
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    doc_ids_BT: Tensor | None,
    start_BE: Tensor | None,
) -> Tensor:
    drive_BT2K = _pairs(drive_BTE)
    decay = _eigenvalues(log_decay, angle, drive_BT2K.dtype)
    resets_BT = _resets(doc_ids_BT)
    state_B2K = torch.zeros_like(drive_BT2K[:, 0]) if start_BE is None else _pairs(start_BE)
    states = []
    for t in range(drive_BT2K.shape[1]):
        if resets_BT is not None:
            state_B2K = torch.where(resets_BT[:, t, None, None], 0.0, state_B2K)
        state_B2K = _times(state_B2K, decay if decay.dim() == 2 else decay[:, t]) + drive_BT2K[:, t]
        states.append(state_B2K)
    return torch.stack(states, dim=1).flatten(-2)


_token_by_token: Callable[..., Any] = torch.compiler.disable(_loop)  # type: ignore[no-untyped-call]
"""A compiler would write out every token's step: for hours, on a long text."""


def chunked(
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """`reference` in chunks of `chunk_size` tokens: inside one, products with the matrix of powers
    of i - j; states carried between.

    These are a real and an imaginary triangular matrix for each eigenstate, the same for all
    chunks. What is carried from chunk to chunk is the same recurrence, solved likewise. With
    documents or eigenvalues of each token's own there is no such matrix: the chunks then go token
    by token, side by side.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    8 C B T K FLOP forward, as much backward; the states are kept for backward, and the
             eigenvalues where each token has its own.
    Raises:  ShapeError as `reference`.
    """
    _check(log_decay, angle, drive_BTE, doc_ids_BT, start_BE, chunk_size)
    return _differentiable(
        partial(_by_products, chunk_size=chunk_size),
        log_decay,
        angle,
        drive_BTE,
        doc_ids_BT,
        start_BE,
    )


def fft(
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """`reference` as a convolution by Fourier transforms, padded to 2 T so that nothing wraps
    around: to compare with.

    With documents or eigenvalues of each token's own it is `chunked`.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    O(B T K log T) FLOP, in complex tensors of 2 T tokens.
    Raises:  ShapeError as `reference`.
    """
    _check(log_decay, angle, drive_BTE, doc_ids_BT, start_BE, chunk_size)
    return _differentiable(_by_transforms, log_decay, angle, drive_BTE, doc_ids_BT, start_BE)


def triton(
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """`reference` in Triton's kernels on an NVIDIA GPU, forward and backward:
    `flatout.ops.scan_passes` says how.

    A drive in bf16 or fp16 is read as it is. On a CPU, where Triton does not run, and in fp64 it is
    `chunked`. The same numbers come out every time: no program adds to what another wrote.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`; the drive is read twice and the states are written once; backward, the
             gradient is read twice, the states are read once and the drive's gradient is written
             once. The states are kept, and the eigenvalues.
    Raises:  ShapeError as `reference`; MissingPackage on a GPU without Triton.
    """
    wide = torch.promote_types(drive_BTE.dtype, torch.float32)
    return _by_kernels(log_decay, angle, drive_BTE, doc_ids_BT, start_BE, chunk_size, wide)


def triton_narrow(
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """`triton` with each state rounded to the drive's type as it is written, and read in that type
    backward; elsewhere `chunked`, rounded.

    The recurrence itself, and what is carried from chunk to chunk, stay fp32: no rounding is
    carried on from token to token.

    Shapes:  as `reference`.
    Returns: states_BTE, in the drive's type.
    Cost:    as `triton`: 8 B T K numbers move forward and 16 B T K backward, of two bytes for a
             drive in bf16.
    Raises:  as `triton`.
    """
    return _by_kernels(
        log_decay, angle, drive_BTE, doc_ids_BT, start_BE, chunk_size, drive_BTE.dtype
    )


def _by_kernels(
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    doc_ids_BT: Tensor | None,
    start_BE: Tensor | None,
    chunk_size: int,
    result: torch.dtype,
) -> Tensor:
    """Return the states in the type asked for."""
    if drive_BTE.dtype == torch.float64 or not _runs_triton(drive_BTE):
        return chunked(
            log_decay,
            angle,
            drive_BTE,
            doc_ids_BT=doc_ids_BT,
            start_BE=start_BE,
            chunk_size=chunk_size,
        ).to(result)
    _check(log_decay, angle, drive_BTE, doc_ids_BT, start_BE, chunk_size)
    start_BE = None if start_BE is None else start_BE.float()
    states_BTE: Tensor = _passes().states(
        log_decay.float(),
        angle.float(),
        drive_BTE,
        _resets(doc_ids_BT),
        start_BE,
        chunk_size,
        result,
    )
    return states_BTE


def _runs_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _passes() -> Any:
    try:
        from flatout.ops import scan_passes
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise MissingPackage(
            "The speedup triton-scan takes the package triton, which is not installed.",
            fix="Install it: `pip install triton`; or leave triton-scan out.",
        ) from error
    return scan_passes


def _differentiable(
    solve: Solve,
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    doc_ids_BT: Tensor | None,
    start_BE: Tensor | None,
) -> Tensor:
    """Return the states by a solver, with the gradients that follow from it; in fp32 whatever
    autocast says.
    """
    with torch.autocast(drive_BTE.device.type, enabled=False):
        drive_BT2K = _pairs(drive_BTE)
        if start_BE is not None:
            first = _eigenvalues(log_decay, angle, drive_BT2K.dtype)
            before_B2K = _times(_pairs(start_BE), first if first.dim() == 2 else first[:, 0])
            drive_BT2K = torch.cat(
                (drive_BT2K[:, :1] + before_B2K[:, None], drive_BT2K[:, 1:]), dim=1
            )
        states_BT2K: Tensor = _Scan.apply(log_decay, angle, drive_BT2K, _resets(doc_ids_BT), solve)  # type: ignore[no-untyped-call]
        return states_BT2K.flatten(-2)


class _Scan(torch.autograd.Function):
    """States from a state of zero on. The gradient of a recurrence is the same recurrence, with
    conjugate eigenvalues, from the end back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        log_decay: Tensor,
        angle: Tensor,
        drive_BT2K: Tensor,
        resets_BT: Tensor | None,
        solve: Solve,
    ) -> Tensor:
        """Return the states, and keep them."""
        states_BT2K = solve(log_decay, angle, drive_BT2K, resets_BT)
        ctx.save_for_backward(log_decay, angle, states_BT2K, resets_BT)
        ctx.solve = solve
        return states_BT2K

    @staticmethod
    def backward(
        ctx: Any, grad_BT2K: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor, None, None]:
        """Return the gradients of the eigenvalues and of the drive."""
        log_decay, angle, states_BT2K, resets_BT = ctx.saved_tensors
        with torch.autocast(grad_BT2K.device.type, enabled=False):
            later = (
                (log_decay, -angle)
                if log_decay.dim() == 1
                else (_one_earlier(log_decay).flip(1), -_one_earlier(angle).flip(1))
            )
            resets_later = None if resets_BT is None else _one_earlier(resets_BT).flip(1)
            drive_grad_BT2K = ctx.solve(*later, grad_BT2K.flip(1), resets_later).flip(1)
            if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
                return None, None, drive_grad_BT2K, None, None
            along, across = _conjugate_products(states_BT2K, drive_grad_BT2K, resets_BT)
            if log_decay.dim() == 1:
                along, across = along.sum(dim=(0, 1)), across.sum(dim=(0, 1))
            real, imaginary = _eigenvalues(log_decay, angle, states_BT2K.dtype).unbind(dim=-2)
            along, across = real * along + imaginary * across, real * across - imaginary * along
            return along.to(log_decay.dtype), across.to(angle.dtype), drive_grad_BT2K, None, None


def _conjugate_products(
    states_BT2K: Tensor, grad_BT2K: Tensor, resets_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of each token's gradient times the conjugate of the state that it
    goes on from; zero where it goes on from none.
    """
    before_BT2K, grad_BT2K = states_BT2K[:, :-1], grad_BT2K[:, 1:]
    along_BTK = (grad_BT2K * before_BT2K).sum(dim=-2)
    across_BTK = (
        grad_BT2K[..., 1, :] * before_BT2K[..., 0, :]
        - grad_BT2K[..., 0, :] * before_BT2K[..., 1, :]
    )
    along_BTK, across_BTK = (
        functional.pad(each_BTK, (0, 0, 1, 0)) for each_BTK in (along_BTK, across_BTK)
    )
    if resets_BT is None:
        return along_BTK, across_BTK
    return torch.where(resets_BT[..., None], 0.0, along_BTK), torch.where(
        resets_BT[..., None], 0.0, across_BTK
    )


def _by_products(
    log_decay: Tensor,
    angle: Tensor,
    drive_BT2K: Tensor,
    resets_BT: Tensor | None,
    *,
    chunk_size: int,
) -> Tensor:
    if log_decay.dim() > 1 or resets_BT is not None:
        return _side_by_side(log_decay, angle, drive_BT2K, resets_BT)
    return _in_chunks(log_decay.double(), angle.double(), drive_BT2K, chunk_size)


def _in_chunks(log_decay_K: Tensor, angle_K: Tensor, drive_BT2K: Tensor, chunk_size: int) -> Tensor:
    """Return the states by four products for each eigenstate; the powers are worked out in fp64,
    since the angle of many tokens is a large number.

    Eigenstates come first in memory while it works: a product then reads and writes what lies side
    by side.
    """
    rows, tokens, _, num_eigenstates = drive_BT2K.shape
    size = min(chunk_size, tokens)
    chunks = -(-tokens // size)
    place = torch.arange(size + 1, device=drive_BT2K.device, dtype=torch.float64)
    powers_K2P = _eigenvalues(
        log_decay_K[:, None] * place, angle_K[:, None] * place, drive_BT2K.dtype, dim=1
    )
    lacking = chunks * size - tokens
    whole_BT2K = functional.pad(drive_BT2K, (0, 0, 0, 0, 0, lacking)) if lacking else drive_BT2K
    drive_2KMC = (
        whole_BT2K.reshape(-1, 2 * num_eigenstates)
        .t()
        .contiguous()
        .view(2, num_eigenstates, rows * chunks, size)
    )
    real_KCC, imaginary_KCC = (_toeplitz(part_KP[:, :size]) for part_KP in powers_K2P.unbind(dim=1))
    states_2KMC = drive_2KMC @ real_KCC
    states_2KMC[0].baddbmm_(drive_2KMC[1], imaginary_KCC, alpha=-1)
    states_2KMC[1].baddbmm_(drive_2KMC[0], imaginary_KCC)
    if chunks > 1:
        later_2KBNC = states_2KMC.view(2, num_eigenstates, rows, chunks, size)[:, :, :, 1:]
        ends_BN2K = states_2KMC.view(2, num_eigenstates, rows, chunks, size)[
            :, :, :, :-1, -1
        ].permute(2, 3, 0, 1)
        carried_BN2K = _in_chunks(
            log_decay_K * size, angle_K * size, ends_BN2K, max(chunk_size, SMALLEST_CARRY)
        )
        real_KBN1, imaginary_KBN1 = carried_BN2K.permute(2, 3, 0, 1)[..., None].unbind()
        since_K11C, turned_K11C = powers_K2P[:, :, None, None, 1:].unbind(dim=1)
        later_2KBNC[0].addcmul_(real_KBN1, since_K11C).addcmul_(
            imaginary_KBN1, turned_K11C, value=-1
        )
        later_2KBNC[1].addcmul_(real_KBN1, turned_K11C).addcmul_(imaginary_KBN1, since_K11C)
    return (
        states_2KMC.view(2 * num_eigenstates, -1)
        .t()
        .contiguous()
        .view(rows, -1, 2, num_eigenstates)[:, :tokens]
    )


def _toeplitz(powers_KC: Tensor) -> Tensor:
    """Matrices (K, C, C) that hold at [j, i] the power i - j, and zero where that is negative: a
    row of drives times one is sums over the past.
    """
    size = powers_KC.shape[1]
    return functional.pad(powers_KC, (size - 1, 0)).unfold(1, size, 1).flip(1)


def _side_by_side(
    log_decay: Tensor, angle: Tensor, drive_BT2K: Tensor, resets_BT: Tensor | None
) -> Tensor:
    """Return the states of about sqrt(T) chunks that go token by token at the same time, then what
    each is handed by those before.

    It is done in fp64: an eigenvalue that is rounded once is wrong ten thousand times over for a
    state that lasts as many tokens. What a document leaves is never multiplied by zero, which would
    let its NaN through: it is replaced by zero.
    """
    tokens = drive_BT2K.shape[1]
    size = math.isqrt(tokens - 1) + 1
    chunks = -(-tokens // size)

    def cut(tensor: Tensor) -> Tensor:
        lacking = chunks * size - tokens
        padded = (
            torch.cat(
                (tensor, tensor.new_zeros(tensor.shape[0], lacking, *tensor.shape[2:])), dim=1
            )
            if lacking
            else tensor
        )
        return padded.reshape(tensor.shape[0], chunks, size, *tensor.shape[2:])

    decay = _eigenvalues(log_decay.double(), angle.double(), torch.float64)
    decay_BNC2K = decay.expand(1, chunks, size, -1, -1) if decay.dim() == 2 else cut(decay)
    drive_BNC2K = cut(drive_BT2K.double())
    is_cut_BNC = (
        torch.zeros_like(drive_BNC2K[..., 0, 0], dtype=torch.bool)
        if resets_BT is None
        else cut(resets_BT)
    )
    states_BNC2K, since_BNC2K = torch.empty_like(drive_BNC2K), torch.empty_like(decay_BNC2K)
    state_BN2K, since_BN2K = torch.zeros_like(drive_BNC2K[:, :, 0]), _one_like(decay_BNC2K[:, :, 0])
    for i in range(size):
        state_BN2K = torch.where(is_cut_BNC[:, :, i, None, None], 0.0, state_BN2K)
        state_BN2K = _times(state_BN2K, decay_BNC2K[:, :, i]) + drive_BNC2K[:, :, i]
        since_BN2K = _times(since_BN2K, decay_BNC2K[:, :, i])
        states_BNC2K[:, :, i], since_BNC2K[:, :, i] = state_BN2K, since_BN2K
    goes_on_BNC = is_cut_BNC.cumsum(dim=2) == 0
    state_B2K = torch.zeros_like(state_BN2K[:, 0])
    for n in range(chunks):
        handed_BC2K = torch.where(
            goes_on_BNC[:, n, :, None, None], _times(state_B2K[:, None], since_BNC2K[:, n]), 0.0
        )
        states_BNC2K[:, n] += handed_BC2K
        state_B2K = states_BNC2K[:, n, -1]
    return states_BNC2K.flatten(1, 2)[:, :tokens].to(drive_BT2K.dtype)


def _by_transforms(
    log_decay: Tensor, angle: Tensor, drive_BT2K: Tensor, resets_BT: Tensor | None
) -> Tensor:
    if log_decay.dim() > 1 or resets_BT is not None:
        return _side_by_side(log_decay, angle, drive_BT2K, resets_BT)
    tokens = drive_BT2K.shape[1]
    place_T1 = torch.arange(tokens, device=drive_BT2K.device, dtype=torch.float64)[:, None]
    answer_T2K = _eigenvalues(
        log_decay.double() * place_T1, angle.double() * place_T1, drive_BT2K.dtype
    )
    drive_BTK, answer_TK = (
        torch.complex(*pairs.unbind(dim=-2)) for pairs in (drive_BT2K, answer_T2K)
    )
    spectrum_BTK = torch.fft.fft(drive_BTK, n=2 * tokens, dim=1) * torch.fft.fft(
        answer_TK, n=2 * tokens, dim=0
    )
    states_BTK = torch.fft.ifft(spectrum_BTK, dim=1)[:, :tokens]
    return torch.stack((states_BTK.real, states_BTK.imag), dim=-2)


def _pairs(parts: Tensor) -> Tensor:
    """Cut K real and K imaginary parts into pairs of K, in fp32 at least."""
    return at_least_fp32(parts).reshape(*parts.shape[:-1], 2, -1)


def _eigenvalues(log_decay: Tensor, angle: Tensor, dtype: torch.dtype, *, dim: int = -2) -> Tensor:
    """Real and imaginary parts of exp(log_decay + i angle); never a complex power, since 0 ** 0 has
    no gradient.
    """
    log_decay, angle = at_least_fp32(log_decay), at_least_fp32(angle)
    magnitude = log_decay.exp()
    return torch.stack((magnitude * angle.cos(), magnitude * angle.sin()), dim=dim).to(dtype)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Product of complex numbers in pairs, the last dimension but one."""
    a, b = left.unbind(dim=-2)
    c, d = right.unbind(dim=-2)
    return torch.stack((a * c - b * d, a * d + b * c), dim=-2)


def _one_like(pairs: Tensor) -> Tensor:
    return torch.stack(
        (torch.ones_like(pairs[..., 0, :]), torch.zeros_like(pairs[..., 1, :])), dim=-2
    )


def _one_earlier(tensor: Tensor) -> Tensor:
    """Shift along the tokens: at t what was at t + 1, and zeros at the end."""
    return torch.cat((tensor[:, 1:], torch.zeros_like(tensor[:, :1])), dim=1)


def _resets(doc_ids_BT: Tensor | None) -> Tensor | None:
    """Say at which tokens another document begins than the one before."""
    return (
        None
        if doc_ids_BT is None
        else functional.pad(doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1], (1, 0))
    )


def _check(
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    doc_ids_BT: Tensor | None,
    start_BE: Tensor | None,
    chunk_size: int,
) -> None:
    rows, tokens, parts = drive_BTE.shape
    if (
        log_decay.shape != angle.shape
        or log_decay.shape not in {(parts // 2,), (rows, tokens, parts // 2)}
        or parts % 2
        or not tokens
    ):
        raise ShapeError(
            f"The recurrence got decays {tuple(log_decay.shape)}, angles {tuple(angle.shape)} and a drive {tuple(drive_BTE.shape)}.",
            fix="Give decays and angles one shape, (K,) or (B, T, K), and a drive of (B, T, 2 K) with a token at least.",
        )
    if doc_ids_BT is not None and doc_ids_BT.shape != (rows, tokens):
        raise ShapeError(
            f"Document ids {tuple(doc_ids_BT.shape)} do not name {rows} rows of {tokens} tokens.",
            fix="Give one id for each token.",
        )
    if start_BE is not None and start_BE.shape != (rows, parts):
        raise ShapeError(
            f"A start of {tuple(start_BE.shape)} does not go before a drive of {tuple(drive_BTE.shape)}.",
            fix="Give it (B, 2 K).",
        )
    if chunk_size < 1:
        raise ShapeError(
            f"A chunk of {chunk_size} tokens holds nothing.", fix="Set model.chunk_size=auto."
        )
