"""Stopping on request: SIGINT and SIGTERM ask, the loop answers between micro-batches, and all
ranks give the same answer.

Several ranks must stop at the same micro-batch. So each rank casts votes (`agreement.py`) and reads
the one before: nobody waits, and a request takes effect one vote late. A single rank needs no vote.

Python runs a signal's handler only between two of its own instructions, and the backward pass of a
micro-batch is one of them. The interpreter writes the signal's number to a pipe at once, so a
thread that reads the pipe can say that the request has arrived.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from flatout.training.agreement import Vote

if TYPE_CHECKING:
    from flatout.assembly.run import Run

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST_S = 1.0
"""A second SIGINT within this time is the first once more: a terminal and a launcher both pass it
on.
"""
MICRO_BATCHES_BETWEEN_VOTES = {"cuda": 8}
"""Several ranks vote before each micro-batch, on a GPU before every eighth: reading a vote waits
for the work that was queued before it,
and the host must be free to queue ahead."""


class StopRequests:
    """A context in which SIGINT and SIGTERM ask the loop to stop. A second SIGINT interrupts at
    once.

    The handlers of before come back at the end. Only a program's main thread may set handlers;
    elsewhere nothing is changed.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], object] | None = None,
        launcher: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call `say`, from a thread, with one line as soon as a request arrives; None: say nothing.

        `launcher` is the process that started this one and must outlive it: when it has ended, that
        is a request as well.
        """
        self.signal_number: int | None = None
        """The signal that asked first, on this rank."""
        self.waits_for = "the preparations of the first step"
        """What must end before a request takes effect, for the line that is said."""
        self._say = say
        self._launcher = launcher
        self._listener: _Listener | None = None
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
        if self._say is not None:
            self._listener = _Listener(self._announce)
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def asked(self, run: Run) -> bool:
        """Say whether to stop now. Every rank calls it at the same places, and all get the same
        answer.
        """
        wanted = self.signal_number is not None or self._launcher_ended()
        if run.mesh.world_size == 1:
            return wanted
        before, self._vote = self._vote, Vote(run.mesh, wanted)
        return before is not None and before.count() > 0

    def asked_within_step(self, run: Run, number: int) -> bool:
        """Say whether to drop the step before its micro-batch `number`, counted from 1. All ranks
        get the same answer.
        """
        if run.mesh.world_size > 1 and (number - 1) % MICRO_BATCHES_BETWEEN_VOTES.get(
            run.mesh.device.type, 1
        ):
            return False
        return self.asked(run)

    def _launcher_ended(self) -> bool:
        """A killed torchrun takes no process with it, and nobody would restart or stop what it has
        left.
        """
        if self._launcher is None or os.getppid() == self._launcher:
            return False
        if self._say is not None:
            self._say(f"torchrun, process {self._launcher}, has ended: the run saves and stops.")
            self._say = None
        return True

    def _announce(self, number: int) -> None:
        assert self._say is not None, "there is a listener only where there is somebody to tell"
        again = (
            " Press Ctrl+C again to leave at once, without saving."
            if number == signal.SIGINT
            else ""
        )
        self._say(
            f"{signal.Signals(number).name} received: the run waits for {self.waits_for}, then saves and stops.{again}"
        )

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = self._clock()
        if self.signal_number is None:
            self.signal_number = number
        if number == signal.SIGINT:
            if self._first_sigint_s is None:
                self._first_sigint_s = now
            elif now - self._first_sigint_s >= SAME_REQUEST_S:
                raise KeyboardInterrupt


class _Listener:
    """A thread that passes on the first stop signal as soon as it arrives, whatever the main thread
    is doing.

    Only the main thread may make one. While another listener is registered (asyncio has one), it is
    left in place and nothing is heard.
    """

    def __init__(self, heard: Callable[[int], object]) -> None:
        self._heard = heard
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if self._before != -1:
            signal.set_wakeup_fd(self._before)
        self._thread = threading.Thread(target=self._listen, name="flatout-signals", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        told = False
        while arrived := os.read(self._reader, 64):
            for number in arrived:
                if number in SIGNALS and not told:
                    told = True
                    self._heard(number)

    def close(self) -> None:
        """Stop listening, and wait for the thread."""
        if self._before == -1:
            signal.set_wakeup_fd(-1)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)
