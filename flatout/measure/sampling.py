"""Finds the lines of the user's code on which a thread spends its time. No torch.

A second thread looks at Python's stacks every few milliseconds. It needs no permission, slows
nothing that runs outside Python's lock, and works with any loop.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Self

from flatout.measure.evidence import CallSite

INTERVAL_S = 0.004
"""Time between two samples."""
MIN_SAMPLES = 3
"""A line that was seen less often is not reported."""
MOST_SITES = 5
"""Lines reported per kind."""
ELSEWHERE = frozenset({"data", "save"})
"""Kinds for which the work may be in another thread, while this one waits for it."""
LOOP = str(Path(__file__).parents[1] / "training" / "loop.py")
"""The file of flatout's training loop."""
KINDS = {
    "data_wait": "data",
    "copy": "copy",
    "compute": "compute",
    "optimizer": "optimizer",
    "logging": "logging",
    "checkpoint": "save",
    "evaluation": "evaluation",
    "gc": "gc",
    None: "python",
}
"""Kind of the lines in `Evidence.sites`, by the phase in which they run."""


@cache
def is_user_code(file: str) -> bool:
    """Return whether a file is neither part of Python, nor installed, nor part of flatout."""
    if file.startswith("<"):
        return file.startswith(("<ipython-input", "<stdin"))
    path = Path(file)
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return False
    own = Path(__file__).parents[1]
    library = sysconfig.get_path("stdlib")
    return not any(path.is_relative_to(folder) for folder in (own, library))


def line_of(file: str, number: int) -> str:
    """Return a line of a source file, without indentation; "" when it cannot be read."""
    return linecache.getline(file, number).strip()


def user_frame(frame: FrameType | None) -> tuple[str, int] | None:
    """Return file and line of the innermost frame of user code, or None.

    What called flatout's own training loop is not looked at. A frame of another thread may end
    meanwhile; Python 3.11 has then been seen to return something else as its caller.
    """
    while isinstance(frame, FrameType) and frame.f_code.co_filename != LOOP:
        if is_user_code(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


class LineSampler:
    """Attributes the time of a thread to lines of user code, by the phase that it is in.

    `phase` is called in the sampling thread; `PhaseTimer.current` is one. `thread` is the thread
    to watch, by default the one that creates the sampler. While it waits for data or a save, lines
    of user code in other threads count.
    """

    def __init__(
        self,
        phase: Callable[[], str | None],
        *,
        thread: int | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._phase, self._interval_s = phase, interval_s
        self._watched = threading.get_ident() if thread is None else thread
        self._samples: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
        self._seconds: dict[str, dict[tuple[str, int], float]] = defaultdict(
            lambda: defaultdict(float)
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flatout-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def sites(self, steps: int) -> dict[str, tuple[CallSite, ...]]:
        """Return the lines by kind, as in `Evidence.sites`, averaged over a number of steps."""
        return {
            kind: tuple(
                CallSite(
                    file=file,
                    line=number,
                    text=line_of(file, number),
                    seconds_per_step=seconds / max(steps, 1),
                )
                for (file, number), seconds in sorted(found.items(), key=lambda pair: -pair[1])[
                    :MOST_SITES
                ]
                if self._samples[kind][file, number] >= MIN_SAMPLES
            )
            for kind, found in self._seconds.items()
        }

    def _run(self) -> None:
        last_s = time.perf_counter()
        while not self._stop.wait(self._interval_s):
            now_s = time.perf_counter()
            self._look(now_s - last_s)
            last_s = now_s

    def _look(self, seconds: float) -> None:
        frames = sys._current_frames()
        kind = KINDS.get(self._phase(), "python")
        found = user_frame(frames.get(self._watched))
        if found is None and kind in ELSEWHERE:
            ignored = {self._watched, threading.get_ident()}
            others = (user_frame(frame) for one, frame in frames.items() if one not in ignored)
            found = next(filter(None, others), None)
        if found is not None:
            self._samples[kind][found] += 1
            self._seconds[kind][found] += seconds
