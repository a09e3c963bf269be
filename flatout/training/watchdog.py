"""A watchdog: it reports when a run does nothing for too long, where it hangs, and on which rank.

A thread compares `run.pulse.beats` at intervals, so that a step pays one addition for it. Time is
counted in those intervals: a process that was suspended has not hung.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

import torch

from flatout.config.registry import is_user_code
from flatout.errors import Stopped
from flatout.storage.files import open_own
from flatout.storage.recognised import read_regular
from flatout.training.run_dir import layout

if TYPE_CHECKING:
    from flatout.assembly.run import Run

BEATING = ("training", "evaluating")
"""Activities whose every batch is a beat."""
PATIENCE = 4
"""How many times the limit all other work may take: compiling, saving, sampling."""
TICKS = 10
"""Looks at the pulse in the time of the limit."""
SILENT_S = 10.0
"""By how much a rank's report may be late. The clocks of machines differ."""
STUCK_DISK_S = 30.0
"""How long the end of a process waits for a report to be written."""
PACKAGE = str(Path(__file__).parents[1])
ENTRY = str(Path(__file__).with_name("run.py"))
"""The file through which a process starts training. Its callers are not where a run hangs."""


@dataclass(frozen=True)
class Sign:
    """A sign of life of one rank, which it writes to the run directory."""

    rank: int
    host: str
    step: int
    beats: int
    activity: str
    time: float
    """Seconds since 1970."""


class Watchdog:
    """A context in which a thread reports when a run does nothing for `train.watchdog_minutes`.

    Every rank has one, and writes the stacks of its own threads. Rank 0 reports which is
    behind, or, if it reports nothing itself, the others. With `train.watchdog_stop`, the process
    then ends with exit code 75, without saving: the loop is stuck. Steps since the last checkpoint
    are lost.
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
        # Rank 0 ends first: the others would be taken for the cause.
        self._grace_s = self._limit_s / TICKS * (2 if run.mesh.is_main else 5)
        self._speaks = run.mesh.is_main
        self._loop_id = 0
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ending = threading.Timer(0, lambda: None)
        """Runs from a report to the end of the process, even if the report waits for a disk."""

    def __enter__(self) -> Self:
        if self._limit_s:
            self._loop_id = threading.get_ident()
            self._threads.append(_started("flatout-watchdog", self._watch))
            if self._run.mesh.world_size > 1:  # a separate thread: it may wait for a stuck disk
                self._threads.append(_started("flatout-signs", self._give_signs))
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._ending.cancel()
        if not self._threads:
            return
        for thread in self._threads:
            thread.join(timeout=1)
        folder = self._run.folder / layout.WATCHDOG
        with suppress(OSError):
            _sign_path(folder, self._run.mesh.rank).unlink(missing_ok=True)
        with suppress(OSError):  # it keeps the reports
            folder.rmdir()

    def _watch(self) -> None:
        pulse, interval_s = self._run.pulse, self._limit_s / TICKS
        seen, idle_s, is_stalled = -1, 0.0, False
        while not self._closing.wait(interval_s):
            if pulse.beats != seen:
                if is_stalled:
                    self._ending.cancel()
                    line = f"Step {self._run.step + 1:,} continues after {_time(idle_s)}."
                    self._tell("stall_over", line, text=line)
                seen, idle_s, is_stalled = pulse.beats, 0.0, False
                self._speaks = self._run.mesh.is_main
            else:
                idle_s += interval_s
            limit_s = self._limit_s * (1 if pulse.activity in BEATING else PATIENCE)
            if idle_s > limit_s - interval_s / 2 and not is_stalled:
                is_stalled = True
                self._ending = threading.Timer(self._grace_s, self._give_up, [idle_s])
                self._ending.daemon = True
                self._ending.start()
                end = f"The process ends in {_time(self._grace_s)}, unless it continues."
                self._report(idle_s, end if self._stops else "")

    def _give_up(self, idle_s: float) -> None:
        """Report when rank 0 has not, and end the process where that is wanted."""

        def last_words() -> None:
            since_s = time.time() - idle_s - self._grace_s
            told = (e for e in layout.read_events(self._run.folder) if e["event"] == "stall")
            if not self._speaks and not any(e.get("time", 0.0) > since_s for e in told):
                self._speaks = True
                self._report(idle_s + self._grace_s, "The process ends." if self._stops else "")
            if self._stops and layout.read_exit_code(self._run.folder) is None:
                layout.write_exit_code(self._run.folder, Stopped.exit_code)

        _started("flatout-watchdog-end", last_words).join(STUCK_DISK_S)
        if self._stops:
            self._end(Stopped.exit_code)

    def _report(self, idle_s: float, end: str) -> None:
        run = self._run
        lines = [
            f"No progress for {_time(idle_s)} after step {run.step:,}, while {run.pulse.activity}.",
            *doing(run.mesh.device, self._loop_id),
            *filter(None, [end]),
        ]
        self._say_it(" ".join(lines))
        folder, world_size, verdict = run.folder / layout.WATCHDOG, run.mesh.world_size, ""
        if world_size > 1:
            late_s = min(3 * self._limit_s / TICKS + SILENT_S, self._limit_s)
            verdict = waiting_for(folder, world_size, late_s=late_s)
            lines.append(verdict)
        path = folder / f"step-{run.step}-rank-{run.mesh.rank}.txt"
        where = f"The stacks of all threads are in {path}."
        try:
            me = f"{socket.gethostname()}, rank {run.mesh.rank}, process {os.getpid()}"
            write_stacks(path, [me, *lines])
        except OSError as error:
            where = f"The stacks of all threads cannot be written: {error}."
        where = f"{verdict} {where}".lstrip()
        self._tell("stall", where, seconds=round(idle_s), text=" ".join(lines), path=str(path))

    def _tell(self, kind: str, line: str, **fields: str | float) -> None:
        """Show a line and record an event, on the rank that reports."""
        self._say_it(line)
        if self._speaks:
            with suppress(OSError):
                layout.append_event(self._run.folder, kind, step=self._run.step, **fields)

    def _say_it(self, line: str) -> None:
        if self._speaks and not self._run.mesh.is_main:
            print(f"[rank {self._run.mesh.rank}] {line}", file=sys.stderr, flush=True)
        elif self._speaks and self._say is not None:
            self._say(line)

    def _give_signs(self) -> None:
        run, rank = self._run, self._run.mesh.rank
        path = _sign_path(run.folder / layout.WATCHDOG, rank)
        while not self._closing.wait(self._limit_s / TICKS):
            host, pulse = socket.gethostname(), run.pulse
            sign = Sign(rank, host, run.step, pulse.beats, pulse.activity, time.time())
            with suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
                    file.write(json.dumps(asdict(sign)).encode())
                    file.truncate()


def waiting_for(folder: Path, world_size: int, *, late_s: float) -> str:
    """Return a sentence that names the ranks that the others wait for, by their signs of life.

    A rank whose newest sign is older than `late_s` seconds does not run.
    """
    signs, gone, now_s = [], [], time.time()
    for rank in range(world_size):
        try:
            sign = Sign(**json.loads(read_regular(_sign_path(folder, rank))))
        except (OSError, ValueError, TypeError):
            gone.append(f"rank {rank}, which never gave a sign of life")
            continue
        signs.append(sign)
        if now_s - sign.time > late_s:
            since = _time(now_s - sign.time)
            gone.append(f"rank {rank} on {sign.host}, without a sign of life for {since}")
    if gone:
        return f"Stopped, killed or unreachable: {'; '.join(gone)}."
    fewest = min(sign.beats for sign in signs)
    behind = [
        f"rank {sign.rank} on {sign.host} (after step {sign.step:,}, while {sign.activity})"
        for sign in signs
        if sign.beats == fewest
    ]
    if len(behind) == world_size:
        return f"All {world_size} ranks have done the same work."
    return f"The others wait for {' and '.join(behind)}."


def doing(device: torch.device, loop_id: int) -> list[str]:
    """Return what the loop, data loader, device and writer of checkpoints do, as sentences.

    `loop_id` identifies the thread that trains.
    """
    frames = sys._current_frames()
    frame = {thread.name: frames.get(thread.ident or 0) for thread in threading.enumerate()}
    loop = frames.get(loop_id)
    lines = [f"The loop is in {_place(loop)}.{_in_your_code(loop)}"]
    loader, writer = frame.get("flatout-loader"), frame.get("checkpoint")
    if loader is not None:
        own = _own_frame(loader)
        is_ahead = own is not None and own.f_code.co_name == "_read"
        what = "has read ahead" if is_ahead else f"is reading in {_place(loader)}"
        lines.append(f"The data loader {what}.{_in_your_code(loader)}")
    if writer is not None:
        lines.append(f"A checkpoint is being written, in {_place(writer)}.")
    if device.type == "cuda":
        lines.append(f"The GPU {_gpu_state(device)}.")
    return lines


def write_stacks(path: Path, lines: Sequence[str]) -> None:
    """Write these lines and the stacks of all threads to a file of a run directory."""
    path.parent.mkdir(exist_ok=True)
    names = [
        f"Thread 0x{thread.ident or 0:016x} is {thread.name}" for thread in threading.enumerate()
    ]
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write("\n".join([*lines, "", *names, "", ""]))
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame in this package."""
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame


def _place(frame: FrameType | None) -> str:
    """Return where a thread is: the innermost function of this package, and what it calls."""
    own = _own_frame(frame)
    shown = own or frame
    if frame is None or shown is None:
        return "no Python code"
    where = _line(shown)
    return where if shown is frame else f"{where}, which calls {frame.f_code.co_name}"


def _in_your_code(frame: FrameType | None) -> str:
    """Return a sentence that names the innermost function of the user's own code, or ""."""
    while frame is not None and frame.f_code.co_filename != ENTRY:
        if is_user_code(frame.f_code.co_filename):
            return f" In your code, that is in {_line(frame)}."
        frame = frame.f_back
    return ""


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _gpu_state(device: torch.device) -> str:
    try:
        is_idle = torch.cuda.default_stream(device).query()
    except RuntimeError as error:
        return f"cannot be asked: {str(error).splitlines()[0]}"
    return "has no work" if is_idle else "has not finished its work"


def _started(name: str, work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _sign_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
