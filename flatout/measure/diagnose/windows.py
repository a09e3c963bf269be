"""The windows of a measured run: warm-up, ordinary steps, marked calls, profiler, replaced parts.

The training loop asks before each step whether to stop; each question moves the windows forward by
one step. Every window is a generator that yields once per step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import cast

import torch

from flatout.assembly.run import Run
from flatout.data.load.feed import PrefetchFeed
from flatout.hardware import CpuTimes, usable_cores
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.diagnose.timers import FixedFeed, TimedFeed
from flatout.measure.instruments.disk_use import DiskUse, disk_use
from flatout.measure.instruments.marked_calls import MarkedCalls, OperationLines
from flatout.measure.instruments.phase_timer import PhaseTimer
from flatout.measure.instruments.sampling import LineSampler
from flatout.measure.instruments.trace import Trace, profiling, read
from flatout.measure.trials.pace import is_steady
from flatout.training.metrics.compile_events import Compilations, CompilationWatch

MIN_STEPS = 5
"""Fewest ordinary steps."""
FEW_STEPS = 2
"""Steps of the windows that count calls and record operations."""
TURNS = 3
"""Comparisons of steps with and without a replaced part."""
MIN_WARM_STEPS = 3
"""Fewest steps of the warm-up."""
MAX_TRACED_S = 5.0
"""Longer steps are not profiled: the trace would fill the memory."""


class Windows:
    """Decides when a measured run stops, and keeps what its windows have measured."""

    def __init__(self, run: Run, feed: TimedFeed, timer: PhaseTimer, spec: MeasureSpec) -> None:
        self.steps = 0
        """Ordinary steps."""
        self.step_s = 0.0
        """Seconds of an average ordinary step."""
        self.step_times_s: tuple[float, ...] = ()
        self.phases: dict[str, float] = {}
        """Seconds of an average ordinary step by phase, on the host."""
        self.calls: dict[str, int] = {}
        self.full_collections = 0
        self.compilations: Compilations | None = None
        """Compilations during the ordinary steps."""
        self.sampler: LineSampler | None = None
        self.marked: MarkedCalls | None = None
        """What FEW_STEPS steps called."""
        self.lines: OperationLines | None = None
        """The lines that called the operations of one step."""
        self.trace: Trace | None = None
        self.counterfactual_s: dict[str, float] = {}
        self.disk: DiskUse | None = None
        self.other_cores: float | None = None
        """Cores that other processes kept busy during the ordinary steps."""
        self.notes: list[str] = []
        self._run, self._feed, self._timer, self._spec = run, feed, timer, spec
        self._late_s = time.monotonic() + spec.limit_s / 2
        self._course = self._windows()

    def requested(self, run: Run) -> bool:
        """Return whether the measurement is over; the loop calls it before each step."""
        if self._timer.current is not None:
            self._timer.leave()
        return next(self._course, False) is False

    def close(self) -> None:
        """End the current window, after an error."""
        self._course.close()

    def _windows(self) -> Generator[bool, None, None]:
        yield from self._warm_up()
        yield from self._ordinary()
        if self._spec.brief:
            return
        if self._is_late():
            self.notes.append(f"A step takes {self.step_s:.0f} s: only its phases were measured.")
            return
        yield from self._marked_calls()
        if self.step_s <= MAX_TRACED_S:
            yield from self._profiled()
        else:
            self.notes.append(f"A step takes {self.step_s:.0f} s: operations were not recorded.")
        yield from self._counterfactual("synthetic-data", self._fixed_data)
        cores = usable_cores()
        if self._run.mesh.device.type == "cpu" and torch.get_num_threads() < cores:
            yield from self._counterfactual("all-threads", partial(_threads, cores))

    def _warm_up(self) -> Iterator[bool]:
        times: list[float] = []
        start_s = time.perf_counter()
        while len(times) < MIN_WARM_STEPS or not is_steady(times):
            began_s = time.perf_counter()
            if len(times) >= MIN_WARM_STEPS and (
                began_s - start_s - times[0] > self._spec.warmup_s
            ):
                break
            yield True
            self._wait()
            times.append(time.perf_counter() - began_s)

    def _ordinary(self) -> Iterator[bool]:
        timer, compiled = self._timer, CompilationWatch()
        disk, before = disk_use(), CpuTimes.read()
        with LineSampler(lambda: timer.current) as sampler, timer.collecting_gc():
            seconds, steps = yield from self._steps(MIN_STEPS, self._spec.seconds)
        self.other_cores = before.others_until(CpuTimes.read())
        self.steps, self.step_s = steps, seconds / steps
        self.step_times_s = tuple(timer.step_times_s)
        self.phases = dict(timer.per_step())
        self.calls = dict(timer.calls)
        self.full_collections = timer.full_collections
        self.sampler, self.compilations = sampler, compiled.poll()
        self.disk = disk_use() - disk

    def _marked_calls(self) -> Iterator[bool]:
        self.marked = MarkedCalls()
        with self.marked.recording():
            yield from self._steps(FEW_STEPS)
        if not any(each.on and each.name.startswith("compile") for each in self._run.decisions):
            self.lines = OperationLines()
            with self.lines:
                yield from self._steps(1)

    def _profiled(self) -> Iterator[bool]:
        device = str(self._run.mesh.device)
        with ExitStack() as stack:
            try:
                profiler = stack.enter_context(profiling(device))
            except RuntimeError as error:  # a profiler is not permitted, or another one is active
                self.notes.append(_unprofiled(str(error)))
                return
            seconds, steps = yield from self._steps(FEW_STEPS)
        self.trace = read(profiler, steps=steps, wall_s=seconds)
        if device.startswith("cuda") and not self.trace.kernels:
            self.notes.append(_unprofiled("the driver shows no kernels (CUPTI is not permitted)"))
            self.trace = None

    def _counterfactual(
        self, name: str, replaced: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[bool]:
        """Measure steps with a part replaced, in turns with ordinary steps.

        The median of their ratios counts, so that a machine that becomes slower does not.
        """
        ratios: list[float] = []
        for _ in range(TURNS):
            if self._is_late():
                break
            with replaced():
                yield from self._steps(1)
                seconds, steps = yield from self._steps(2, self._spec.seconds / (4 * TURNS))
            ordinary_s, number = yield from self._steps(2, self._spec.seconds / (4 * TURNS))
            ratios.append(seconds / steps / (ordinary_s / number))
        if ratios:
            self.counterfactual_s[name] = statistics.median(ratios) * self.step_s

    def _steps(
        self, at_least: int, seconds: float = 0.0
    ) -> Generator[bool, None, tuple[float, int]]:
        """Take steps; return their total seconds and their number."""
        self._wait()
        self._timer.reset()
        start_s, steps = time.perf_counter(), 0
        while (
            steps < (min(at_least, 2) if self._is_late() else at_least)
            or time.perf_counter() - start_s < seconds
        ):
            self._timer.start_step()
            yield True
            steps += 1
        self._timer.end_steps()
        self._wait()
        return time.perf_counter() - start_s, steps

    def _is_late(self) -> bool:
        """Return whether the steps are so slow that what is not measured yet must be left out."""
        return time.monotonic() > self._late_s

    def _wait(self) -> None:
        if self._run.mesh.device.type == "cuda":
            torch.cuda.synchronize(self._run.mesh.device)

    @contextmanager
    def _fixed_data(self) -> Iterator[None]:
        batch = self._feed.last
        if batch is not None:
            self._run.feed = cast(PrefetchFeed, FixedFeed(self._feed, batch))
        try:
            yield
        finally:
            self._run.feed = cast(PrefetchFeed, self._feed)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _unprofiled(why: str) -> str:
    """Return the note that the profiler could not be used."""
    return (
        f"The profiler could not be used: {why.splitlines()[0] if why else 'unknown reason'}. Step "
        "times, data wait, garbage collection, compilation and lines of code were measured without "
        "it; operations by class were not."
    )
