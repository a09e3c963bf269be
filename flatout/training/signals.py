"""Stop on request: after a signal, all ranks stop at the same micro-batch boundary, and save.

With several ranks, each casts a vote (`agreement.py`) at every opportunity and reads the result of
the previous one: no rank waits, and a request takes effect one vote late. A single rank needs no
vote.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Self

from flatout.distributed.launch import SAME_REQUEST_S
from flatout.training.agreement import Vote

if TYPE_CHECKING:
    from flatout.assembly.run import Run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 is what Slurm's `--signal=USR1@300` sends before the time limit."""
MICRO_BATCHES_BETWEEN_VOTES = {"cuda": 8}
"""Several ranks vote before every micro-batch on a CPU, before every eighth on a GPU.

Reading a vote waits for the work queued before it, and the host needs time to queue ahead.
"""


class WorkInterrupted(BaseException):
    """A stop request has interrupted work whose result the run can do without.

    Not an Exception: code that handles errors must not catch it.
    """


class StopRequests:
    """A context in which SIGNALS stop the loop. A second SIGINT interrupts at once.

    The previous handlers are restored at the end. Only the main thread may set handlers. In any
    other, this does nothing.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], object] | None = None,
        launcher: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say` is called with one line, from another thread, when a request arrives.

        `launcher` is the id of the parent process. If it ends first, that is also a request.
        """
        self.signal_number: int | None = None
        """The first signal that this rank received."""
        self.waits_for = "the preparations of the first step"
        """The work that must finish before a request takes effect, for the announcement.

        Empty when there is none.
        """
        self._requested_s: float | None = None
        self._interrupts = False
        self._say = say
        self._launcher = launcher
        self._clock = clock
        self._first_sigint_s: float | None = None
        self._previous: dict[
            signal.Signals, Callable[[int, FrameType | None], object] | int | None
        ] = {}
        self._vote: Vote | None = None

    def __enter__(self) -> Self:
        try:
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._receive)
        except ValueError:  # not the main thread
            self._previous.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @property
    def cause(self) -> str:
        """What asked this rank to stop: the name of a signal, or the end of the launcher."""
        if self.signal_number is None:
            return "the end of the launcher"
        return signal.Signals(self.signal_number).name

    def since_request_s(self) -> float | None:
        """Return the seconds since this rank was asked to stop, or None if it was not.

        Any thread may call it, for example one that uploads and has a limited time left.
        """
        return None if self._requested_s is None else self._clock() - self._requested_s

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise WorkInterrupted in the block as soon as a request arrives, or at once after one.

        For long work that changes nothing that is saved, such as compiling. It is raised once, so
        that cleaning up is not interrupted.
        Raises: WorkInterrupted.
        """
        waits_for, self.waits_for = self.waits_for, ""
        self._interrupts = True
        try:
            if self.signal_number is not None:
                raise WorkInterrupted
            yield
        finally:
            self._interrupts = False
            if self.signal_number is None:
                self.waits_for = waits_for

    def interrupting(self, sample: Callable[[Run], str]) -> Callable[[Run], str]:
        """Return `sample` as a function that a request interrupts, as `interruptible`."""

        def until_stop(run: Run) -> str:
            with self.interruptible():
                return sample(run)

        return until_stop

    def requested(self, run: Run) -> bool:
        """Return whether to stop now. All ranks call it at the same points, and get one answer."""
        requested = self.signal_number is not None or self._launcher_ended()
        if run.mesh.world_size == 1:
            return requested
        previous, self._vote = self._vote, Vote(run.mesh, requested)
        return previous is not None and previous.count() > 0

    def requested_within_step(self, run: Run, number: int) -> bool:
        """Return whether to drop the step before its micro-batch `number`, counted from 1.

        All ranks get the same answer.
        """
        every = MICRO_BATCHES_BETWEEN_VOTES.get(run.mesh.device.type, 1)
        if run.mesh.world_size > 1 and (number - 1) % every:
            return False
        return self.requested(run)

    def _launcher_ended(self) -> bool:
        """Return whether the launcher has ended: when it is killed, its processes stay."""
        if self._launcher is None or os.getppid() == self._launcher:
            return False
        if self._requested_s is None:
            self._requested_s = self._clock()
            if self._say is not None:
                self._say(
                    f"The launcher, process {self._launcher}, has ended: the run saves and stops."
                )
        return True

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = self._clock()
        if self._requested_s is None:
            self._requested_s = now
        if self.signal_number is None:
            self.signal_number = number
            if self._say is not None:
                wait = f"waits for {self.waits_for}, then " if self.waits_for else ""
                line = f"{signal.Signals(number).name} received: the run {wait}saves and stops."
                if number == signal.SIGINT:
                    line += " Press Ctrl+C again to quit immediately, without saving."
                # the main thread may be printing, and hold the lock of the output
                threading.Thread(target=self._say, args=[line], daemon=True).start()
        if number == signal.SIGINT:
            if self._first_sigint_s is None:
                self._first_sigint_s = now
            elif now - self._first_sigint_s >= SAME_REQUEST_S:
                raise KeyboardInterrupt
        if self._interrupts:
            self._interrupts = False
            raise WorkInterrupted
