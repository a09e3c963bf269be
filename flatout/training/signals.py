"""Stopping on request: SIGINT and SIGTERM ask, the loop answers after the step, and all ranks give the same answer.

Several ranks must stop after the same step, or the rest would wait for ever in a collective. So every step each rank casts a
vote (a number on the device, summed over ranks like the loss) and reads the sum of the vote before, which the device has long
finished: nobody waits, and a request takes effect one step late. A single rank needs no vote.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flatout.run import Run

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST_S = 1.0
"""A second SIGINT within this time is the first once more: a terminal and a launcher both pass it on."""


class StopRequests:
    """A context in which SIGINT and SIGTERM ask the loop to stop. A second SIGINT interrupts at once.

    The handlers of before come back at the end. Only a program's main thread may set handlers; elsewhere nothing is changed.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal_number: int | None = None
        """The signal that asked first, on this rank."""
        self._clock = clock
        self._first_sigint_s: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._vote: _Vote | None = None

    def __enter__(self) -> Self:
        try:
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._receive)
        except ValueError:  # not the main thread
            self._before.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def asked(self, run: Run) -> bool:
        """Say whether to stop now. Every rank calls it once a step, and all get the same answer."""
        wanted = self.signal_number is not None
        if run.mesh.world_size == 1:
            return wanted
        before, self._vote = self._vote, _Vote(run, wanted)
        return before is not None and before.carried()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = self._clock()
        if self.signal_number is None:
            self.signal_number = number
        if number == signal.SIGINT:
            if self._first_sigint_s is None:
                self._first_sigint_s = now
            elif now - self._first_sigint_s >= SAME_REQUEST_S:
                raise KeyboardInterrupt


class _Vote:
    """One sum over all ranks, on its way from the device to the host."""

    def __init__(self, run: Run, wanted: bool) -> None:
        on_cuda = run.mesh.device.type == "cuda"
        vote = torch.tensor(float(wanted), pin_memory=on_cuda).to(run.mesh.device, non_blocking=True)
        (total,) = run.mesh.sum(vote)
        self._sum: Tensor = torch.empty((), pin_memory=True).copy_(total, non_blocking=True) if on_cuda else total
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        if self._copied:
            self._copied.record()

    def carried(self) -> bool:
        """Say whether any rank asked; waits for the copy alone, which has long been made."""
        if self._copied:
            self._copied.synchronize()
        return bool(self._sum > 0)
