"""Finds the lines of the user's code on which a thread spends its time. No torch.

A second thread looks at Python's stacks every few milliseconds. It needs no permission, slows
nothing that runs outside Python's lock, and works with any loop.
"""

from __future__ import annotations

import faulthandler
import itertools
import linecache
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import IO, Self

from flatout.config.registry import PACKAGE_DIR, is_user_code
from flatout.errors import FlatoutError
from flatout.measure.attach.guard import guarded
from flatout.measure.evidence import FAILURES, LINES, CallSite, Failure

INTERVAL_S = 0.004
"""Time between two samples."""
SWITCH_S = 1e-6
"""How long the sampler waits for Python's lock before it asks for it. Timers make it about 0.05 ms.
Python code that is shorter counts for the next operation that releases the lock. Beside a thread
that computes in Python, the sampler waits as long as any other: shorter turns are faster there.
"""
LONGEST_INTERVAL_S, ENOUGH_SAMPLES = 0.25, 300
"""A sample takes about 0.3 ms, so after ENOUGH_SAMPLES they become rarer."""
MIN_SAMPLES = 3
"""A line that was seen less often is not reported."""
MOST_SITES = 5
"""Lines reported per kind."""
ELSEWHERE = frozenset({"data", "save"})
"""Kinds for which the work may be in another thread, while this one waits for it."""
WAITS = ("threading.py", "selectors.py", "socket.py")
"""Files in which a thread waits."""
OF_OPTIMIZER = ("torch/nn/utils/clip_grad.py", "torch/optim/optimizer.py", "amp/grad_scaler.py")
"""Files whose work belongs to the optimizer's step."""
LONGEST = 300
"""Messages of errors are truncated to this many characters."""
CHECKPOINT, BACKWARD = "torch/utils/checkpoint.py", "torch/autograd/graph.py"
"""The file that computes a part of the forward pass again, and the one that goes backward."""
OWN = str(PACKAGE_DIR / "measure")
"""Start of the files that measure."""
LOOP = str(PACKAGE_DIR / "training" / "loop.py")
"""The file of flatout's training loop."""
KINDS = LINES | {
    "copy": "copy",
    "communication": "communication",
    "logging": "logging",
    "gc": "gc",
    "other": "python",
    "": "python",
}
"""Kind of the lines in `Evidence.sites`, by the phase in which they run."""

Line = tuple[str, int]
"""A file and a line number."""

_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in ')
# what is not ASCII in the name of a file
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def line_of(file: str, number: int) -> str:
    """Return a line of a source file, without indentation. "" when it cannot be read."""
    linecache.checkcache(file)  # it may have been edited meanwhile
    return linecache.getline(file, number).strip()


class LineTotals:
    """How often something happens at lines of user code, and what it takes, by kind."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[Line]] = defaultdict(Counter)
        self.seconds: defaultdict[str, defaultdict[Line, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        self.callers: dict[Line, Line] = {}
        """The lines of user code that call the functions of sampled lines."""

    def add(self, kind: str, line: Line, seconds: float) -> None:
        """Count something at a line."""
        self.counts[kind][line] += 1
        self.seconds[kind][line] += seconds

    def total(self, kind: str) -> int:
        """Return how often a kind was counted."""
        return sum(self.counts[kind].values())

    def sites(self, steps: float, *, at_least: int = 1) -> dict[str, tuple[CallSite, ...]]:
        """Return the costliest lines by kind, as in `Evidence.sites`, averaged over some steps.

        Lines that were counted less often than `at_least` are omitted.
        """
        found: dict[str, tuple[CallSite, ...]] = {}
        for kind, counts in self.counts.items():
            seconds = self.seconds[kind]
            known = [line for line in counts if counts[line] >= at_least]
            known.sort(key=lambda line: (-seconds[line], -counts[line], line))
            found[kind] = tuple(
                site.model_copy(
                    update={
                        "seconds_per_step": seconds[line] / max(steps, 1) or None,
                        "caller": site_at(self.callers.get(line)),
                    }
                )
                for line in known[:MOST_SITES]
                if (site := site_at(line))
            )
        return found


def site_at(line: Line | None) -> CallSite | None:
    """Return a line of source code as a site. None for None."""
    return None if line is None else CallSite(file=line[0], line=line[1], text=line_of(*line))


def site_of(error: BaseException) -> CallSite | None:
    """Return the innermost line of user code in the traceback of an error's cause, or None."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code.co_filename, number) for frame, number in frames]
    return site_at(user_line(lines[::-1]))


def failure_of(error: BaseException, step: int) -> Failure:
    """Return an error of a run as evidence."""
    names = (each.__name__ for each in type(error).__mro__)
    kind = next((FAILURES[name] for name in names if name in FAILURES), "error")
    first = (str(error).strip().splitlines() or [""])[0][:LONGEST]
    message, fix = f"{type(error).__name__}: {first}".rstrip(": "), None
    if hasattr(error, "get_first_failure"):  # torchrun's
        rank, ended = error.get_first_failure()
        message = f"Rank {rank} ended with exit code {ended.exitcode}"
    elif isinstance(error, FlatoutError):
        message, fix = error.what, error.fix
    elif "out of shared memory" in first or "</torch_" in first:
        fix = (
            "Start the container with --shm-size=8g: /dev/shm, through which worker processes "
            "send batches, is too small. Or use num_workers=0."
        )
    elif isinstance(error, ModuleNotFoundError):
        message = f"The package {error.name} is not installed."
        fix = f"Install it: `pip install {(error.name or '').partition('.')[0]}`."
    known = {"kind": kind, "message": message, "fix": fix, "step": step, "site": site_of(error)}
    return Failure.model_validate(known)


def user_frame(frame: FrameType | None) -> Line | None:
    """Return file and line of the innermost frame of user code, or None.

    `frame` belongs to this thread: Python 3.11 may crash when it walks the frames of another one.
    """
    return user_line(stack_of(frame))


def stack_of(frame: FrameType | None) -> Iterator[Line]:
    """Yield file and line of a frame of this thread and of its callers, innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def user_lines(stack: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines of user code in a stack, innermost first.

    Callers of flatout's own training loop do not count.
    """
    for file, number in stack:
        if file == LOOP:
            return
        if is_user_code(file):
            yield file, number


def user_line(stack: Iterable[Line]) -> Line | None:
    """Return the first line of user code in a stack, innermost first. None when there is none."""
    return next(user_lines(stack), None)


def stacks_in(file: IO[bytes]) -> dict[int, list[Line]]:
    """Return file and line of each frame, innermost first, by thread, 100 frames at most.

    Python's fault handler has written them to a file, which creates no objects. Walking another
    thread's frames in Python is unsafe: they may end between two steps of the walk.
    """
    file.seek(0)
    lines = file.read().decode("ascii", "replace").splitlines()
    found: dict[int, list[Line]] = {}
    stack: list[Line] = []
    for line in lines:
        if thread := _THREAD.match(line):
            stack = found[int(thread[1], 16)] = []
        elif frame := _FRAME.match(line):
            name = _ESCAPED.sub(lambda found: chr(int(found[0][2:], 16)), frame[1])
            stack.append((name, int(frame[2])))
    return found


def memory_file() -> IO[bytes]:
    """Open a file that needs no disk, or a temporary one where the system has none."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stacks"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def pause_s(interval_s: float, elapsed_s: float) -> float:
    """Return the time to the next sample, `elapsed_s` after the first one."""
    return max(interval_s, min(elapsed_s / ENOUGH_SAMPLES, LONGEST_INTERVAL_S))


class LineSampler:
    """Attributes the time of a thread to lines of user code, by the phase that it is in.

    `phase` is called in the sampling thread. `PhaseTimer.current` is one. `thread` is the thread
    to watch, by default the one that creates the sampler. While it waits for data or a save, lines
    of user code in other threads count. `workers` yields lines of other processes and seconds.
    """

    def __init__(
        self,
        phase: Callable[[], str | None],
        *,
        thread: int | None = None,
        interval_s: float = INTERVAL_S,
        workers: Callable[[], Iterable[tuple[Line, float]]] = tuple,
    ) -> None:
        self._phase, self._interval_s, self._workers = phase, interval_s, workers
        self._watched = threading.get_ident() if thread is None else thread
        self.lines = LineTotals()
        self._of_step: list[tuple[str, Line, float]] | None = []
        """What was added since a step ended. None: nothing is added until the next one ends."""
        self._stop, self._file = threading.Event(), memory_file()
        self._thread = threading.Thread(target=self._run, name="flatout-sampler", daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether it takes samples now."""
        return not self._stop.is_set()

    def __enter__(self) -> Self:
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, SWITCH_S))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._file.close()
        sys.setswitchinterval(self._switch_s)

    def sites(self, steps: int) -> dict[str, tuple[CallSite, ...]]:
        """Return the lines by kind, as in `Evidence.sites`, averaged over a number of steps."""
        return self.lines.sites(steps, at_least=MIN_SAMPLES)

    def end_step(self) -> None:
        """Keep what was seen in a step that has ended."""
        self._of_step = []

    def drop_step(self) -> None:
        """Forget what was seen since then: it may be what follows the loop."""
        dropped, self._of_step = self._of_step or (), None
        for kind, line, seconds in dropped:
            self.lines.counts[kind][line] -= 1
            self.lines.seconds[kind][line] -= seconds

    def _add(self, kind: str, line: Line, seconds: float) -> None:
        of_step = self._of_step  # the loop's thread may exchange it
        if of_step is not None:
            self.lines.add(kind, line, seconds)
            of_step.append((kind, line, seconds))

    def _run(self) -> None:
        began_s = last_s = time.perf_counter()
        while not self._stop.wait(pause_s(self._interval_s, last_s - began_s)):
            now_s = time.perf_counter()
            guarded(self._look)(now_s - last_s)
            last_s = now_s

    def _look(self, seconds: float) -> None:
        phase = self._phase()  # nothing from here to the stacks lets other threads run
        faulthandler.dump_traceback(self._file, all_threads=True)
        is_of_phase = self._phase() == phase
        stacks = stacks_in(self._file)
        self._file.truncate(0)
        self._file.seek(0)
        for place, taken_s in self._workers():
            self._add("worker", place, taken_s)
        for one, frames in stacks.items():
            line = user_line(frames) if one != self._watched else None
            if line is not None and not frames[0][0].endswith(WAITS):
                self._add("thread", line, seconds)
                sys.setswitchinterval(self._switch_s)  # its turns would become shorter, too
        if not is_of_phase:
            return
        kind = KINDS.get(phase or "", "python")
        stack = stacks.get(self._watched, [])
        found = user_line(stack)
        inner = itertools.takewhile(lambda line: line != found, stack)
        if kind == "python" and stack and stack[0][0].startswith(OWN):
            return  # the cost of measuring
        if kind == "python" and any(file.endswith(OF_OPTIMIZER) for file, _ in inner):
            kind = "optimizer"
        if found is None and kind in ELSEWHERE:
            ignored = {self._watched, threading.get_ident()}
            others = (user_line(stack) for one, stack in stacks.items() if one not in ignored)
            found = next(filter(None, others), None)
        at = [number for number, (file, _) in enumerate(stack) if file.endswith(CHECKPOINT)]
        if at and found is not None:
            is_again = any(file.endswith(BACKWARD) for file, _ in stack)
            begins = found if is_again else user_line(stack[at[-1] :])
            self._add("recomputed" if is_again else "checkpointed", begins or found, seconds)
        if found is not None:
            self._add(kind, found, seconds)
            # a comprehension is called by its own line
            caller = next((line for line in user_lines(stack) if line != found), None)
            if caller is not None:
                self.lines.callers[found] = caller
