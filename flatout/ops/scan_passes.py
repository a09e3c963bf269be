"""The diagonal complex recurrence of ops/scan.py by the Triton kernels of ops/scan_kernels.py.

There are three passes. First, each program walks one chunk from a state of zero and stores the
final state. The states that enter the chunks follow the same recurrence over these final states and
are computed the same way. Then each program walks its chunk again from the state that enters it,
and stores every state. Backward is the same from the last token to the first, with conjugate
eigenvalues. Its last pass also computes the gradients of the eigenvalues. The drive and the
gradient are read twice, states and results are written once. Nothing else grows with the number of
tokens.

Letters: B rows, T tokens, K eigenstates, E = 2 K: K real parts, then K imaginary parts; S steps:
         tokens, or chunks of them; N chunks of steps; F levels: tokens, chunks, chunks of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flatout.errors import MissingPackage

BLOCK = 32
"""Eigenstates per program: one per lane of a warp, which reads 128 bytes of fp32 at a time."""
AT_ONCE = 8
"""Steps that are loaded together."""
SHORT, LONG = 32, 64
"""Steps per chunk. They limit how often an eigenvalue is multiplied by itself, so that rounding
errors do not add up over a long sequence.
"""
FULL = 4_096
"""Programs, of one warp each, that keep a large GPU busy: 132 multiprocessors hold about 32 each.
Chunks are short if there would be fewer.
"""


@dataclass(frozen=True)
class _Steps:
    """A recurrence over the steps of one level, and its division into chunks."""

    drive: Tensor
    """The drive of each step (B, S, E)."""
    factors: Tensor
    """The eigenvalues of a step by level (F, E), this one first."""
    resets: Tensor | None
    """Where a document starts (B, S), bytes."""
    chunk: int
    backward: bool
    """Steps run from the last to the first, with conjugate eigenvalues."""
    adds_first: bool
    """A state is multiplied after its drive is added, not before: it is a gradient that flows to
    the previous token.
    """

    @property
    def chunks(self) -> int:
        return -(-self.drive.shape[1] // self.chunk)

    def launch(
        self, kernel: str, entering_BNE: Tensor | None, *others: Tensor, **constants: object
    ) -> None:
        """Run a kernel with a program for each row, chunk and block of eigenstates."""
        drive_BSE, resets_BS = self.drive, self.resets
        rows, steps, count = drive_BSE.shape[0], drive_BSE.shape[1], drive_BSE.shape[2] // 2
        # The kernel does not read the drive where it stands in for None.
        getattr(_kernels(), kernel)[(rows * self.chunks * -(-count // BLOCK),)](
            drive_BSE, self.factors, drive_BSE if resets_BS is None else resets_BS,
            drive_BSE if entering_BNE is None else entering_BNE, *others, steps, self.chunks,
            COUNT=count, ENTERED=entering_BNE is not None, CUT=resets_BS is not None,
            CHUNK=self.chunk, AT_ONCE=min(AT_ONCE, self.chunk), BLOCK=BLOCK, num_warps=1,
            **constants,
        )  # fmt: skip

    def states(self, entering_BNE: Tensor | None, keeps: str) -> Tensor:
        """Return the state `after` or `before` every step."""
        kept_BSE = torch.empty_like(self.drive, dtype=torch.float32)
        self._walk(entering_BNE, keeps, kept_BSE, kept_BSE)
        return kept_BSE

    def above(self) -> _Steps:
        """Return the same recurrence with chunks as its steps.

        The drive of a chunk is its final state when it starts from zero. Its eigenvalue is the
        product of those of its steps.
        """
        rows, _, parts = self.drive.shape
        ends_BNE = self.drive.new_empty(rows, self.chunks, parts, dtype=torch.float32)
        cuts_BN = None if self.resets is None else self.resets.new_empty(rows, self.chunks)
        self._walk(None, "ends", ends_BNE, ends_BNE if cuts_BN is None else cuts_BN)
        factors = self.factors[1:]
        return replace(self, drive=ends_BNE, factors=factors, resets=cuts_BN, adds_first=False)

    def entering(self, start_BE: Tensor | None) -> Tensor | None:
        """Return the state that enters each chunk (B, N, E). None means zeros."""
        if self.chunks == 1:
            return start_BE
        above = self.above()
        return above.states(above.entering(start_BE), "before")

    def _walk(self, entering_BNE: Tensor | None, keeps: str, *others: Tensor) -> None:
        constants = {"ADDS_FIRST": self.adds_first, "BACKWARD": self.backward}
        self.launch("walk", entering_BNE, *others, KEEPS=keeps, **constants)


def _kernels() -> ModuleType:
    """Import the kernels, inside a custom op, since compilers cannot trace it.

    Raises: MissingPackage when Triton is not installed.
    """
    try:
        return import_module("flatout.ops.scan_kernels")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise MissingPackage(
            "triton-scan needs the package triton, which is not installed.",
            fix="Install it: `pip install triton`, or remove triton-scan from speedups.",
        ) from error


def _steps(
    log_decay_K: Tensor,
    angle_K: Tensor,
    drive_BTE: Tensor,
    resets_BT: Tensor | None,
    chunk_size: int,
    *,
    backward: bool,
) -> _Steps:
    rows, tokens, parts = drive_BTE.shape
    blocks = -(-parts // (2 * BLOCK))
    chunk = min(
        LONG if rows * blocks * -(-tokens // LONG) >= FULL else SHORT,
        1 << max(1, chunk_size.bit_length() - 1),
    )
    levels = next(level for level in range(1, tokens + 1) if chunk**level >= tokens)
    exponents_F1 = torch.arange(levels, device=angle_K.device)[:, None] * (chunk.bit_length() - 1)
    tokens_F1 = exponents_F1.double().exp2()  # the angle over many tokens is a large number
    powers_FK = torch.polar((log_decay_K.double() * tokens_F1).exp(), angle_K.double() * tokens_F1)
    factors_FE = torch.cat((powers_FK.real, powers_FK.imag), dim=1).float()
    resets = None if resets_BT is None else resets_BT.contiguous().view(torch.uint8)
    return _Steps(drive_BTE.contiguous(), factors_FE, resets, chunk, backward, backward)


@torch.library.custom_op("flatout::scan", mutates_args=())
def states(
    log_decay_K: Tensor,
    angle_K: Tensor,
    drive_BTE: Tensor,
    resets_BT: Tensor | None,
    start_BE: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """Return the state after each token. A custom op, which compilers do not trace.

    Shapes:  log_decay_K, angle_K (K,), fp32; drive_BTE (B, T, 2 K) in fp32, bf16 or fp16;
             resets_BT (B, T) bool; start_BE (B, 2 K) fp32.
    Returns: states_BTE, fp32.
    Cost:    as `flatout.ops.scan.reference`; a program walks at most `chunk_size` tokens, or two.
    """
    with torch.cuda.device_of(drive_BTE):  # type: ignore[no-untyped-call]
        steps = _steps(log_decay_K, angle_K, drive_BTE, resets_BT, chunk_size, backward=False)
        entering_BNE = steps.entering(None if start_BE is None else start_BE.contiguous())
        return steps.states(entering_BNE, "after")


@states.register_fake
def _states_shape(log_decay_K: Tensor, angle_K: Tensor, drive_BTE: Tensor, *_: object) -> Tensor:
    return drive_BTE.new_empty(drive_BTE.shape, dtype=torch.float32)


@torch.library.custom_op("flatout::scan_backward", mutates_args=())
def _backward(
    grad_BTE: Tensor,
    log_decay_K: Tensor,
    angle_K: Tensor,
    states_BTE: Tensor,
    resets_BT: Tensor | None,
    start_BE: Tensor | None,
    drive_dtype: torch.dtype,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of log_decay, angle, drive_BTE and start_BE.

    They are the same bits on every run: no program adds to the output of another.
    """
    with torch.cuda.device_of(grad_BTE):  # type: ignore[no-untyped-call]
        steps = _steps(log_decay_K, angle_K, grad_BTE, resets_BT, chunk_size, backward=True)
        rows, _, parts = grad_BTE.shape
        drive_grad_BTE = torch.empty_like(steps.drive, dtype=drive_dtype)
        start_grad_BE = log_decay_K.new_empty(rows, parts)
        along_BNK, across_BNK = (
            log_decay_K.new_empty(rows, steps.chunks, parts // 2) for _ in range(2)
        )
        steps.launch(
            "gradients",
            steps.entering(None),
            states_BTE.contiguous(),
            states_BTE if start_BE is None else start_BE.contiguous(),
            drive_grad_BTE,
            along_BNK,
            across_BNK,
            start_grad_BE,
            STARTED=start_BE is not None,
        )
        along_K, across_K = along_BNK.sum(dim=(0, 1)), across_BNK.sum(dim=(0, 1))
        return along_K, across_K, drive_grad_BTE, start_grad_BE


@_backward.register_fake
def _backward_shapes(
    grad_BTE: Tensor, log_decay_K: Tensor, angle_K: Tensor, states_BTE: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    drive_dtype = others[-2]
    return (
        torch.empty_like(log_decay_K),
        torch.empty_like(log_decay_K),
        grad_BTE.new_empty(grad_BTE.shape, dtype=drive_dtype),
        log_decay_K.new_empty(states_BTE[:, 0].shape),
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    log_decay_K, angle_K, drive_BTE, resets_BT, start_BE, ctx.chunk_size = inputs
    ctx.drive_dtype = drive_BTE.dtype
    ctx.save_for_backward(log_decay_K, angle_K, output, resets_BT, start_BE)


def _gradients(ctx: Any, grad_BTE: Tensor) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors  # activation checkpointing allows to read them once
    *gradients, start_grad_BE = _backward(grad_BTE, *kept, ctx.drive_dtype, ctx.chunk_size)
    if kept[-1] is None:
        start_grad_BE = None
    return *gradients, None, start_grad_BE, None


states.register_autograd(_gradients, setup_context=_keep_for_backward)
