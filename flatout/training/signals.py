"""Stopping on request: SIGINT and SIGTERM ask, the loop answers after the step, and all ranks give the same answer.

Several ranks must stop after the same step. So every step each rank casts a vote (`agreement.py`) and reads the one before: nobody
waits, and a request takes effect one step late. A single rank needs no vote.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from flatout.training.agreement import Vote

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
        self._vote: Vote | None = None

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
        before, self._vote = self._vote, Vote(run.mesh, wanted)
        return before is not None and before.count() > 0

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = self._clock()
        if self.signal_number is None:
            self.signal_number = number
        if number == signal.SIGINT:
            if self._first_sigint_s is None:
                self._first_sigint_s = now
            elif now - self._first_sigint_s >= SAME_REQUEST_S:
                raise KeyboardInterrupt
