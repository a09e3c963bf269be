"""The windows of a watched loop: warm-up, ordinary steps, marked calls, recorded operations.

The loop says when a step starts; each start moves the windows forward by one step. Every window is
a generator that yields once per step. All steps after the warm-up are ordinary, except for a few
near the start of the loop, which are slower and do not count for the averages.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.profiler import profile

from flatout.hardware import CpuTimes, probe
from flatout.measure.instruments.disk_use import DiskUse, disk_use
from flatout.measure.instruments.evidence import GpuFacts
from flatout.measure.instruments.machine_facts import cpu_times_with_children, gpu_facts
from flatout.measure.instruments.marked_calls import MarkedCalls
from flatout.measure.instruments.phase_timer import PhaseTimer
from flatout.measure.instruments.sampling import LineSampler
from flatout.measure.instruments.trace import Trace, profiling, read
from flatout.measure.watch.hooks import replaced
from flatout.parallel.rendezvous import silence_profiler
from flatout.training.metrics.compile_events import Compilations, CompilationWatch

MIN_WARM_STEPS, MAX_WARM_STEPS = 3, 20
WARM_S = 0.5
"""Warm-up lasts at least this long after the first step, unless it has ten steps before."""
MIN_ORDINARY_STEPS, ORDINARY_S = 5, 0.3
"""Ordinary steps before the special ones."""
CALLED_STEPS = 8
"""Steps whose calls are marked."""
MAX_TRACED_S = 5.0
"""Longer steps are not recorded: their operations would fill the memory."""
MOST_TIMES = 10_000
"""Times of single steps that are kept: the last ones."""
SAMPLED_EVERY_S = 0.01
"""Time between two looks at the loop's line."""
BETWEEN = ("checkpoint", "data_wait", "evaluation")
"""Phases that count although no step is running."""
PERIODIC = ("checkpoint", "evaluation")
"""Phases that are not part of every step, and are averaged over all of them."""


@dataclass
class Totals:
    """What a number of steps took, on the host."""

    steps: int = 0
    seconds: float = 0.0
    """Their wall time."""
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by phase."""
    calls: Counter[str] = field(default_factory=Counter)
    full_collections: int = 0

    def add(self, seconds: float, timer: PhaseTimer) -> None:
        """Add a step."""
        self.steps += 1
        self.seconds += seconds
        for name, value in timer.seconds.items():
            self.phases[name] += value
        self.calls.update(timer.calls)
        self.full_collections += timer.full_collections

    def periodic_s(self) -> float:
        """Return the seconds of work that is not part of every step."""
        return sum(self.phases.get(name, 0.0) for name in PERIODIC)


class Windows:
    """Keeps what the windows of a loop have measured so far."""

    def __init__(
        self,
        timer: PhaseTimer,
        on_step: Callable[[float], None],
        *,
        device: str,
        recorded_steps: int,
    ) -> None:
        self.warm = Totals()
        """Steps of the warm-up."""
        self.ordinary = Totals()
        self.special = Totals()
        """Steps with marked calls or recorded operations."""
        self.step_times_s: deque[float] = deque(maxlen=MOST_TIMES)
        """Single ordinary steps, without saves and evaluation."""
        self.graphs, self.compile_s = 0, 0.0
        """Graphs compiled in ordinary steps, and the seconds that it took."""
        self.compilations: list[Compilations] = []
        """The last compilations in ordinary steps."""
        self.has_compiled = False
        """Whether anything was compiled, the warm-up included."""
        self.sampler: LineSampler | None = None
        self.marked: MarkedCalls | None = None
        """What CALLED_STEPS steps called."""
        self.rare = MarkedCalls()
        """Calls that no step should make, since the warm-up."""
        self.gpu: GpuFacts | None = None
        """What the driver reported of the GPU between two steps."""
        self._others: list[tuple[float, float]] = []
        self._cpu_before: CpuTimes | None = None
        self._disk: list[DiskUse] = []
        self._disk_before: DiskUse | None = None
        """At the start of the current window of ordinary steps."""
        self.between = Totals()
        """Phases after the last batch of an epoch and before the next step. No steps."""
        self.notes: list[str] = []
        self.name = "warm-up"
        """The current window."""
        self._timer, self._on_step = timer, on_step
        self._device, self._recorded_steps = device, recorded_steps
        self._recording: tuple[profile, float] | None = None
        self._compiled = CompilationWatch()
        self._since_s: float | None = None
        self._stack = ExitStack()
        self._course = self._windows()

    def start_step(self) -> None:
        """End the step before, if it has not ended, and start one."""
        if not self.end_step() and self.name != "warm-up":
            for name in BETWEEN:
                self.between.phases[name] += self._timer.seconds.get(name, 0.0)
        next(self._course)
        self._timer.reset()  # after the windows' own work, in which garbage may be collected
        self._since_s = time.perf_counter()

    def end_step(self) -> bool:
        """End the current step without starting another; return whether there was one."""
        if self._since_s is None:
            return False
        seconds = time.perf_counter() - self._since_s
        self._since_s = None
        totals = {"warm-up": self.warm, "ordinary": self.ordinary}.get(self.name, self.special)
        totals.add(seconds, self._timer)
        if totals is self.ordinary:
            aside_s = sum(self._timer.seconds.get(name, 0.0) for name in PERIODIC)
            self.step_times_s.append(max(seconds - aside_s, 0.0))
        self._on_step(seconds)
        self._timer.reset()
        return True

    def drop_step(self) -> None:
        """Forget the current step, which has no batch."""
        self._since_s = None

    def close(self) -> None:
        """End the current window; the step that it interrupts does not count."""
        self._course.close()
        self._stack.close()

    def steps_since_warm_up(self) -> int:
        """Return the number of ordinary and special steps."""
        return self.ordinary.steps + self.special.steps

    @cached_property
    def trace(self) -> Trace | None:
        """The operations of the recorded steps; None if none were recorded."""
        if self._recording is None:
            return None
        profiler, wall_s = self._recording
        trace = read(profiler, steps=self._recorded_steps, wall_s=wall_s)
        if self._device.startswith("cuda") and not trace.kernels:
            self.notes.append("The driver shows no kernels to the profiler.")
            return None
        return trace

    def _windows(self) -> Generator[None, None, None]:
        yield from self._warm_up()
        timer = self._timer
        self.sampler = self._stack.enter_context(
            LineSampler(lambda: timer.current, thread=timer.thread, interval_s=SAMPLED_EVERY_S)
        )
        self._stack.enter_context(self.rare.recording_rare())
        yield from self._ordinary(MIN_ORDINARY_STEPS)
        if not self.compilations:
            yield from self._marked_calls()
            yield from self._recorded()
        else:
            self.notes.append("Steps compile code: their calls and operations were not recorded.")
        yield from self._ordinary()

    def _warm_up(self) -> Iterator[None]:
        yield
        first_s = time.perf_counter()
        while self.warm.steps < MAX_WARM_STEPS:
            compiles = self._compiled.changed()
            self.has_compiled |= compiles
            self._compiled.poll()
            long_enough = time.perf_counter() - first_s >= WARM_S or self.warm.steps >= 10
            if self.warm.steps >= MIN_WARM_STEPS and long_enough and not compiles:
                return
            yield

    def _ordinary(self, enough: float = math.inf) -> Iterator[None]:
        """Take ordinary steps until there are enough of them, and they took long enough."""
        self._wait()
        self.name = "ordinary"
        self._compiled.poll()
        self._disk_before, began_s, steps = disk_use(), time.perf_counter(), 0
        self._cpu_before = cpu_times_with_children()
        try:
            while steps < enough or (
                time.perf_counter() - began_s < ORDINARY_S and steps < MAX_WARM_STEPS
            ):
                yield
                steps += 1
                if self._compiled.changed():
                    self._note_compilations()
        finally:
            self._disk, self._disk_before = self.disk(), None
            self._others, self._cpu_before = self._other_cores(), None

    def other_cores(self) -> float | None:
        """Return the cores that other processes kept busy in ordinary steps; None without any."""
        known = self._other_cores()
        seconds = sum(seconds for _, seconds in known)
        return sum(cores * seconds for cores, seconds in known) / seconds if seconds else None

    def _other_cores(self) -> list[tuple[float, float]]:
        before = self._cpu_before
        if before is None:
            return self._others
        now = cpu_times_with_children()
        return [*self._others, (before.others_until(now), now.at_s - before.at_s)]

    def disk(self) -> list[DiskUse]:
        """Return the reading from disks in ordinary steps up to now; add it up."""
        before = self._disk_before
        return self._disk if before is None else [*self._disk, disk_use() - before]

    def _note_compilations(self) -> None:
        found = self._compiled.poll()
        self.has_compiled = True
        self.compile_s += found.compile_s
        self.compilations.append(found)
        del self.compilations[:-MAX_WARM_STEPS]
        self.graphs += found.graphs

    def _marked_calls(self) -> Iterator[None]:
        self.name = "marked calls"
        self.gpu = gpu_facts(probe(), self._device)  # while it works
        marked = MarkedCalls()
        with marked.recording():
            for _ in range(CALLED_STEPS):
                yield
        self.marked = marked

    def _recorded(self) -> Iterator[None]:
        """Record the operations of a few steps."""
        typical_s = self.ordinary.seconds / max(self.ordinary.steps, 1)
        if not self._recorded_steps:
            return
        if typical_s > MAX_TRACED_S:
            self.notes.append(f"A step takes {typical_s:.0f} s: operations were not recorded.")
            return
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            self.notes.append("Another profiler is active, so operations were not recorded.")
            return
        silence_profiler()
        self._wait()
        self.name, began_s = "recorded", time.perf_counter()
        with ExitStack() as stack:
            try:
                profiler = stack.enter_context(profiling(self._device))
            except RuntimeError as error:  # it is not permitted
                self.notes.append(f"The profiler could not be used: {str(error).splitlines()[0]}.")
                return
            others = stack.enter_context(giving_way(stack))
            for _ in range(self._recorded_steps):
                yield
            if others:
                self.notes.append("Another profiler has started, so operations were not recorded.")
                return
            self._wait()
            wall_s = time.perf_counter() - began_s
        self._recording = profiler, wall_s

    def _wait(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)


@contextmanager
def giving_way(stack: ExitStack) -> Iterator[list[object]]:
    """Close `stack`, which records, when another profiler starts; return a list of those."""
    others: list[object] = []

    def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def start(profiler: object, *args: Any, **kwargs: Any) -> Any:
            if not others:
                others.append(profiler)
                stack.close()
            return plain(profiler, *args, **kwargs)

        return start

    with ExitStack() as replacements:
        for name in ("__enter__", "_prepare_trace", "_start_trace"):
            replacements.enter_context(replaced(torch.autograd.profiler.profile, name, watched))
        yield others
