"""A watchdog: it reports when a run does nothing for too long, with the stacks of all processes.

A thread compares `run.pulse.beats` at intervals, so that a step pays one addition for it. Time is
counted in those intervals: a process that was suspended has not hung.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self

from flatout.display import duration
from flatout.errors import Stopped
from flatout.storage.files import open_own
from flatout.training.run_dir import layout
from flatout.training.run_dir.runlog import record_exit

if TYPE_CHECKING:
    from flatout.assembly.run import Run

BEATING = ("training", "evaluating")
"""Activities whose every batch is a beat."""
PATIENCE = 4
"""How many times the limit all other work may take: compiling, saving, sampling."""
TICKS = 10
"""Looks at the pulse in the time of the limit."""
STUCK_DISK_S = 30.0
"""How long it waits for a report to be written."""


class Watchdog:
    """A context in which a thread reports when a run does nothing for `train.watchdog_minutes`.

    Every rank appends the stacks of its threads to watchdog.txt, and rank 0 tells the user. With
    `train.watchdog_stop`, the process then ends with exit code 75, without saving: the loop is
    stuck. Steps since the last checkpoint are lost.
    """

    def __init__(
        self,
        run: Run,
        *,
        say: Callable[[str], object] | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """`say` is called from another thread. `end` ends the process with an exit code."""
        self._run, self._say, self._end = run, say, end
        self._limit_s = 60 * run.config.train.watchdog_minutes
        self._stops = run.config.train.watchdog_stop
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="flatout-watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._limit_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._limit_s:
            self._thread.join(timeout=1)

    def _watch(self) -> None:
        pulse, interval_s = self._run.pulse, self._limit_s / TICKS
        seen, idle_s, is_stalled = -1, 0.0, False
        while not self._closing.wait(interval_s):
            if pulse.beats != seen:
                if is_stalled:
                    line = f"Step {self._run.step + 1:,} continues after {duration(idle_s)}."
                    _in_time(partial(self._tell, "stall_over", line))
                seen, idle_s, is_stalled = pulse.beats, 0.0, False
                continue
            idle_s += interval_s
            limit_s = self._limit_s * (1 if pulse.activity in BEATING else PATIENCE)
            if idle_s > limit_s - interval_s / 2 and not is_stalled:
                is_stalled = True
                _in_time(partial(self._report, idle_s))
            if self._stops and idle_s > limit_s + 1.5 * interval_s:  # all ranks have reported
                _in_time(self._keep_exit_code)
                self._end(Stopped.exit_code)
                return

    def _report(self, idle_s: float) -> None:
        run, path = self._run, self._run.folder / layout.WATCHDOG
        text = f"No progress for {duration(idle_s)} after step {run.step:,}, while"
        text += f" {run.pulse.activity}."
        ends = " The process ends, unless it continues." if self._stops else ""
        where = f"The stacks of all threads of each process are in {path}."
        self._tell("stall", f"{text} {where}{ends}", seconds=round(idle_s), path=str(path))
        try:
            with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "wb") as file:
                me = f"{socket.gethostname()}, rank {run.mesh.rank}, process {os.getpid()}"
                file.write(f"{me}\n{text}\n\n{stacks()}\n\n".encode())
        except OSError as error:
            if self._say is not None:
                self._say(f"The stacks of all threads cannot be written: {error}.")

    def _tell(self, kind: str, text: str, **fields: str | float) -> None:
        """Show a line and record an event, on rank 0."""
        if self._say is not None:
            self._say(text)
        if self._run.mesh.is_main:
            with suppress(OSError):
                layout.append_event(
                    self._run.folder, kind, step=self._run.step, text=text, **fields
                )

    def _keep_exit_code(self) -> None:
        if layout.read_exit_code(self._run.folder) is None:
            record_exit(self._run.folder, Stopped.exit_code)


def stacks() -> str:
    """Return the names and the stacks of all threads of this process."""
    names = (f"Thread 0x{each.ident or 0:016x} is {each.name}" for each in threading.enumerate())
    with tempfile.TemporaryFile() as file:  # ranks must not write between each other's lines
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return "\n".join([*names, "", file.read().decode(errors="replace")])


def _in_time(work: Callable[[], object]) -> None:
    """Do something that may wait forever for a disk, and wait for it only for a time."""
    thread = threading.Thread(target=work, name="flatout-watchdog-report", daemon=True)
    thread.start()
    thread.join(STUCK_DISK_S)
