"""A diagonal linear recurrence with complex eigenvalues: the memory of an eigenstate network.

Letters: B rows, T tokens, K eigenstates, E = 2 K: K real parts, then K imaginary parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from flatout.errors import ShapeError
from flatout.ops import scan_passes, triton_kernels
from flatout.ops.autograd import Context
from flatout.ops.scan_solvers import by_products, eigenvalues, pairs, times
from flatout.ops.uncompiled import uncompiled

Solve = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(log_decay, angle, drive_BT2K, resets_BT) -> states_BT2K, starting from a state of zero; autograd
does not trace it.
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
    """Return the state after each token: s[t] = exp(log_decay + i angle) * s[t-1] + drive[t].

    The first state continues from `start_BE`: s[-1] = start. At the first token of a document,
    s[t-1] is zero. All tokens share the eigenvalues, or each token has its own (selective). This
    loop is the definition; every variant must match it, gradients included.

    Shapes:  log_decay, angle (K,), or both (B, T, K); drive_BTE (B, T, 2 K); doc_ids_BT (B, T)
             integers; start_BE (B, 2 K), zeros when None.
    Returns: states_BTE, fp32 (fp64 for fp64); the last state is states_BTE[:, -1].
    Units:   log_decay is the logarithm of a factor per token, finite and at most 0; angle is in
             radians per token.
    Cost:    8 B T K FLOP; T steps that cannot overlap. chunk_size is for variants that work in
             chunks: no result depends on it.
    Raises:  ShapeError when the shapes do not match, or chunk_size is below 1.
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
    drive_BT2K = pairs(drive_BTE)
    decay = eigenvalues(log_decay, angle, drive_BT2K.dtype)
    resets_BT = _resets(doc_ids_BT)
    state_B2K = torch.zeros_like(drive_BT2K[:, 0]) if start_BE is None else pairs(start_BE)
    states = []
    for t in range(drive_BT2K.shape[1]):
        if resets_BT is not None:
            state_B2K = torch.where(resets_BT[:, t, None, None], 0.0, state_B2K)
        state_B2K = times(state_B2K, decay if decay.dim() == 2 else decay[:, t]) + drive_BT2K[:, t]
        states.append(state_B2K)
    return torch.stack(states, dim=1).flatten(-2)


_token_by_token: Callable[..., Any] = uncompiled(_loop)
"""A compiler would unroll the loop over tokens, which takes hours for a long sequence."""


def chunked(
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """`reference` in chunks of `chunk_size` tokens, by products with matrices of eigenvalue powers.

    Within a chunk, the state is a product with a triangular matrix of the powers i - j, one real
    and one imaginary matrix per eigenstate, which all chunks share. The states carried between
    chunks follow the same recurrence and are computed the same way. Documents and selective
    eigenvalues have no such matrix: the chunks then advance token by token, in parallel.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    8 C B T K FLOP forward for chunks of C tokens, as much backward; keeps the states for
             backward, and the eigenvalues if they are selective.
    Raises:  ShapeError as `reference`.
    """
    _check(log_decay, angle, drive_BTE, doc_ids_BT, start_BE, chunk_size)
    solve = partial(by_products, chunk_size=chunk_size)
    return _solved(solve, log_decay, angle, drive_BTE, doc_ids_BT, start_BE)


def triton(
    log_decay: Tensor,
    angle: Tensor,
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
             Keeps the states and the eigenvalues.
    Raises:  ShapeError as `reference`; MissingPackage on a GPU without Triton.
    """
    _check(log_decay, angle, drive_BTE, doc_ids_BT, start_BE, chunk_size)
    if drive_BTE.dtype == torch.float64 or not triton_kernels.run_on(drive_BTE):
        solve = partial(by_products, chunk_size=chunk_size)
        return _solved(solve, log_decay, angle, drive_BTE, doc_ids_BT, start_BE)
    start_BE = None if start_BE is None else start_BE.float()
    states_BTE: Tensor = scan_passes.states(
        log_decay.float(), angle.float(), drive_BTE, _resets(doc_ids_BT), start_BE, chunk_size
    )
    return states_BTE


def _solved(
    solve: Solve,
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    doc_ids_BT: Tensor | None,
    start_BE: Tensor | None,
) -> Tensor:
    """Return the states by a solver, differentiable, in at least fp32 even under autocast."""
    with torch.autocast(drive_BTE.device.type, enabled=False):
        drive_BT2K = pairs(drive_BTE)
        if start_BE is not None:
            first = eigenvalues(log_decay, angle, drive_BT2K.dtype)
            before_B2K = times(pairs(start_BE), first if first.dim() == 2 else first[:, 0])
            drive_BT2K = torch.cat(
                (drive_BT2K[:, :1] + before_B2K[:, None], drive_BT2K[:, 1:]), dim=1
            )
        states_BT2K: Tensor = _Scan.apply(log_decay, angle, drive_BT2K, _resets(doc_ids_BT), solve)  # type: ignore[no-untyped-call]
        return states_BT2K.flatten(-2)


class _ScanContext(Context, Protocol):
    solve: Solve


class _Scan(torch.autograd.Function):
    """States starting from zero.

    The gradient of a recurrence is the same recurrence with conjugate eigenvalues, run from the
    last token to the first.
    """

    @staticmethod
    def forward(
        ctx: _ScanContext,
        log_decay: Tensor,
        angle: Tensor,
        drive_BT2K: Tensor,
        resets_BT: Tensor | None,
        solve: Solve,
    ) -> Tensor:
        """Return the states, which are kept for backward."""
        states_BT2K = solve(log_decay, angle, drive_BT2K, resets_BT)
        ctx.save_for_backward(log_decay, angle, states_BT2K, resets_BT)
        ctx.solve = solve
        return states_BT2K

    @staticmethod
    def backward(
        ctx: _ScanContext, grad_BT2K: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor, None, None]:
        """Return the gradients of the eigenvalues and of the drive."""
        log_decay, angle, states_BT2K, resets_BT = ctx.saved_tensors
        with torch.autocast(grad_BT2K.device.type, enabled=False):
            reversed_eigenvalues = (
                (log_decay, -angle)
                if log_decay.dim() == 1
                else (_shifted(log_decay).flip(1), -_shifted(angle).flip(1))
            )
            reversed_resets = None if resets_BT is None else _shifted(resets_BT).flip(1)
            drive_grad_BT2K = ctx.solve(*reversed_eigenvalues, grad_BT2K.flip(1), reversed_resets)
            drive_grad_BT2K = drive_grad_BT2K.flip(1)
            if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
                return None, None, drive_grad_BT2K, None, None
            along, across = _conjugate_products(states_BT2K, drive_grad_BT2K, resets_BT)
            if log_decay.dim() == 1:
                along, across = along.sum(dim=(0, 1)), across.sum(dim=(0, 1))
            real, imaginary = eigenvalues(log_decay, angle, states_BT2K.dtype).unbind(dim=-2)
            along, across = real * along + imaginary * across, real * across - imaginary * along
            return along.to(log_decay.dtype), across.to(angle.dtype), drive_grad_BT2K, None, None


def _conjugate_products(
    states_BT2K: Tensor, grad_BT2K: Tensor, resets_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each token's gradient times the conjugate of the previous state, as two real tensors.

    The products are zero at the first token of a document.
    """
    before_BT2K, grad_BT2K = states_BT2K[:, :-1], grad_BT2K[:, 1:]
    along_BTK = (grad_BT2K * before_BT2K).sum(dim=-2)
    across_BTK = (
        grad_BT2K[..., 1, :] * before_BT2K[..., 0, :]
        - grad_BT2K[..., 0, :] * before_BT2K[..., 1, :]
    )
    padded = [functional.pad(each_BTK, (0, 0, 1, 0)) for each_BTK in (along_BTK, across_BTK)]
    if resets_BT is not None:
        padded = [torch.where(resets_BT[..., None], 0.0, each_BTK) for each_BTK in padded]
    return padded[0], padded[1]


def _shifted(tensor: Tensor) -> Tensor:
    """Return, for each token, the value at the next one, and zeros for the last."""
    return torch.cat((tensor[:, 1:], torch.zeros_like(tensor[:, :1])), dim=1)


def _resets(doc_ids_BT: Tensor | None) -> Tensor | None:
    """Return whether each token starts a new document."""
    if doc_ids_BT is None:
        return None
    return functional.pad(doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1], (1, 0))


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
            f"The recurrence got decays {tuple(log_decay.shape)}, angles {tuple(angle.shape)} and "
            f"a drive {tuple(drive_BTE.shape)}.",
            fix="Give decays and angles that are both (K,) or (B, T, K), and a drive (B, T, 2 K) "
            "with at least one token.",
        )
    if doc_ids_BT is not None and doc_ids_BT.shape != (rows, tokens):
        raise ShapeError(
            f"Document ids of shape {tuple(doc_ids_BT.shape)} do not match {rows} rows of {tokens} "
            "tokens.",
            fix="Give one id per token.",
        )
    if start_BE is not None and start_BE.shape != (rows, parts):
        raise ShapeError(
            f"A start of shape {tuple(start_BE.shape)} does not match a drive "
            f"{tuple(drive_BTE.shape)}.",
            fix="Give a start of shape (B, 2 K).",
        )
    if chunk_size < 1:
        raise ShapeError(
            f"A chunk of {chunk_size} tokens must have at least 1.",
            fix="Set model.chunk_size=auto.",
        )
