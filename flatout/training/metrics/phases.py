"""Times the phases of steps on the host, without counting any moment twice. No torch.

    timer = PhaseTimer()
    with timer.phase("data_wait"):
        batch = next(batches)
    with timer.phase("compute"):
        ...

Phases may nest: the inner one's time does not count for the outer one. With `collecting_gc`, runs
of Python's garbage collector are a separate phase wherever they happen. A phase costs about a
microsecond.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

GC = "gc"
"""The phase of the garbage collector."""


class PhaseTimer:
    """Adds up the seconds of each phase, for the thread that creates it.

    Time outside all phases is not attributed to any.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds by phase, in all steps so far."""
        self.calls: Counter[str] = Counter()
        """How often each phase was entered."""
        self.full_collections = 0
        """Runs of the garbage collector over its oldest generation."""
        self.thread = threading.get_ident()
        """The thread that is timed."""
        self.on_change: Callable[[str | None], object] = lambda name: None
        """Called with the name of a phase that starts, and with None when one ends."""
        self._clock = clock
        self._stack: list[str] = []
        self._since_s = clock()

    @property
    def current(self) -> str | None:
        """The phase that is running. None outside all phases. Any thread may read it."""
        try:
            return self._stack[-1]
        except IndexError:
            return None

    def enter(self, name: str) -> None:
        """Start a phase, which interrupts the current one."""
        self._charge()
        self._stack.append(name)
        self.calls[name] += 1
        self.on_change(name)

    def leave(self) -> None:
        """End the current phase and continue the one that it interrupted."""
        self._charge()
        if self._stack:
            self.on_change(None)
            self._stack.pop()

    def leave_if_open(self, name: str) -> None:
        """End a phase and those inside it, which an error may have left open, if it is open."""
        if name in self._stack:
            while self._stack[-1] != name:
                self.leave()
            self.leave()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def reset(self) -> None:
        """Forget everything so far. A running phase starts again."""
        self.seconds.clear()
        self.calls.clear()
        self.full_collections = 0
        self._since_s = self._clock()

    @contextmanager
    def collecting_gc(self) -> Iterator[None]:
        """Time the garbage collector as the phase `gc` inside the block."""
        gc.callbacks.append(self._on_gc)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, event: str, info: Mapping[str, Any]) -> None:
        if threading.get_ident() != self.thread:
            return
        if event == "start":
            self.enter(GC)
            self.full_collections += info.get("generation") == 2
        else:
            self.leave()

    def _charge(self) -> None:
        """Add the time since the last change to the current phase."""
        now_s = self._clock()
        if self._stack:
            self.seconds[self._stack[-1]] += now_s - self._since_s
        self._since_s = now_s
