"""The stages of a loop's measurement: warm-up, ordinary steps, marked calls, operations, others.

What follows the loop reports when a step starts. Each start moves the stages forward by one step:
a stage is a generator that yields once per step.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from flatout.distributed.rendezvous import silence_profiler
from flatout.errors import RunFailed
from flatout.hardware.machine import BUSY_CORES, probe
from flatout.measure.attach.calls import MarkedCalls
from flatout.measure.attach.guard import replaced
from flatout.measure.attach.lines import Line, LineSampler
from flatout.measure.attach.recorder import MOST_CALLS, CallRecorder
from flatout.measure.attach.request import Recorded, Recording
from flatout.measure.attach.screening import LONG_S, Screening
from flatout.measure.attach.trace import (
    PREFIX,
    Trace,
    document_in,
    phase_ranges,
    profiling,
    read_trace,
)
from flatout.measure.attach.work import Work
from flatout.measure.evidence import CallSite, lasting_s
from flatout.measure.host import Usage, gpu_facts, usage_now
from flatout.training.metrics.compile_events import Compilations, CompilationWatch
from flatout.training.metrics.phases import PhaseTimer

MIN_WARM_STEPS, MAX_WARM_STEPS, WARM_S = 3, 20, 0.5
"""Steps of a warm-up, and its least seconds after the first step, unless it has ten steps."""
MIN_ORDINARY_STEPS, ORDINARY_S = 5, 0.3
"""Ordinary steps before the special ones."""
CALLED_STEPS = 8
"""Steps whose calls are marked."""
SAMPLED_EVERY_S = 0.03
"""Time between two looks at the loop's line."""
MAX_TRACED_S = 5.0
"""Longer steps are not recorded: their operations would fill the memory."""
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
    """How often each phase was entered."""
    full_collections: int = 0
    saves: int = 0
    """Steps after which something was saved, which may be several files."""

    def add(self, seconds: float, timer: PhaseTimer) -> None:
        """Add a step."""
        self.steps += 1
        self.seconds += seconds
        for name, value in timer.seconds.items():
            self.phases[name] += value
        self.calls.update(timer.calls)
        self.full_collections += timer.full_collections
        self.saves += "checkpoint" in timer.calls

    def per_step(self) -> dict[str, float]:
        """Return the seconds of each phase in an average step. {} without steps."""
        return {name: seconds / self.steps for name, seconds in self.phases.items() if self.steps}


class Stages:
    """Moves a loop through the stages of its measurement, and keeps what they have found so far.

    All steps after the warm-up are ordinary, except for a few near the start, which are slower and
    do not count for the averages. Without `is_enough` the last ordinary steps go on for as long as
    the loop does.
    """

    def __init__(
        self,
        timer: PhaseTimer,
        device: str,
        *,
        on_step: Callable[[float], object],
        recorded_steps: int,
        is_enough: Callable[[Stages], bool],
        recording: Recording | None,
    ) -> None:
        self.warm, self.ordinary = Totals(), Totals()
        self.special = Totals()
        """Steps with marked calls, recorded operations or replaced parts."""
        self.between = Totals()
        """Phases after the last batch of an epoch and before the next step, by epoch."""
        self.compilations = deque[Compilations](maxlen=20)
        """The last compilations in ordinary steps."""
        self.graphs, self.compile_s = 0, 0.0
        """Graphs compiled in ordinary steps, and the seconds that it took."""
        self.has_compiled = False
        """Whether anything was compiled, the warm-up included."""
        self.sampler: LineSampler | None = None
        self.rare = MarkedCalls()
        """Calls that no step should make, in the steps that are sampled."""
        self.sampled_steps = 0
        """Steps that `sampler` and `rare` have seen."""
        self.called_steps = CALLED_STEPS
        """Steps whose calls are marked."""
        self.recording: CallRecorder | None = None
        """What records the calls of the current step."""
        self.recorder: CallRecorder | None = None
        """What has recorded those of some steps."""
        self.waits: dict[str, float] = {}
        """Reads and unpinned copies in an average step, as in `Evidence`. {} means not measured."""
        self.sites: dict[str, tuple[CallSite, ...]] = {}
        """The lines that made them."""
        self.gpu: dict[str, Any] = {}
        """What the driver reported of the GPU between two steps."""
        self.screening: Screening | None = None
        """What measures changes at the end, if there are any."""
        self.notes: list[str] = []
        self.name = "warm-up"
        """The current stage."""
        self.first_recorded = 0
        """The first step that was recorded, of those that were asked for."""
        self.recorded_s: float | None = None
        """What these took in all. None until the last one has ended."""
        self.workers: Callable[[], Iterable[tuple[Line, float]]] = tuple
        """What yields the lines of worker processes, as for `LineSampler`."""
        self.timer, self.device = timer, device
        self.profiler: profile | None = None
        """What recorded the operations, if that was possible."""
        self.recorded_steps = recording.steps if recording is not None else recorded_steps
        self._recording = recording
        self._on_step, self._is_enough = on_step, is_enough
        self._compiled = CompilationWatch()
        self._usages: list[Usage] = []
        """Of the machine, at the start and the end of each stage of ordinary steps."""
        self._since_s: float | None = None
        self._stages = self._all_stages()

    def _all_stages(self) -> Generator[None, None, None]:
        """Yield once per step, stage after stage."""
        if self._recording is not None:
            yield from self._recorded(self._recording)
            return
        yield from self._until_compiled()
        with self._sampling():
            yield from self._ordinary(
                lambda steps, seconds: (
                    steps < fewest(MIN_ORDINARY_STEPS, steps, seconds)
                    or (seconds < ORDINARY_S and steps < MAX_WARM_STEPS)
                )
            )
        if self.compilations:
            self.notes.append("Steps compile code: their calls and operations were not recorded.")
        else:
            self.gpu = gpu_facts(probe(), self.device)  # while it works
            yield from self._marked_calls()
            # the profiler prints an error when a thread other than the first one starts it
            if threading.current_thread() is threading.main_thread():
                yield from self._operations()
        with self._sampling():
            yield from self._ordinary(lambda steps, seconds: not self._is_enough(self))
        if self.screening is not None:
            self.name = "screened"
            is_busy = (self.usage()["other_busy_cores"] or 0.0) > BUSY_CORES
            yield from self.screening.run(on_gpu=self.on_gpu, is_busy=is_busy)

    def start_step(self) -> bool:
        """End the step before, if it has not ended, and start one. False: the stages are over."""
        if not self.end_step() and self.name != "warm-up":
            self.between.add(0.0, self.timer)
        is_over = next(self._stages, self) is self
        self.timer.reset()  # after the stages' own work, in which garbage may be collected
        self._since_s = None if is_over else time.perf_counter()
        return not is_over

    def end_step(self) -> bool:
        """End the current step without starting another, and return whether there was one."""
        if self._since_s is None:
            return False
        seconds = time.perf_counter() - self._since_s
        self._since_s = None
        totals = {"warm-up": self.warm, "ordinary": self.ordinary}.get(self.name, self.special)
        totals.add(seconds, self.timer)
        if self.sampler is not None:
            self.sampled_steps += self.sampler.is_running
            self.sampler.end_step()
        self._on_step(seconds)
        self.timer.reset()
        return True

    def close(self) -> None:
        """End the current stage. The step that it interrupts does not count."""
        self._stages.close()

    @property
    def step_s(self) -> float:
        """Seconds of an average ordinary step, without saves and evaluation."""
        aside_s = sum(self.ordinary.phases.get(name, 0.0) for name in PERIODIC)
        return (self.ordinary.seconds - aside_s) / max(self.ordinary.steps, 1)

    def periodic_s(self) -> dict[str, float | None]:
        """Return the seconds per step of work that is not part of every step, as in `Evidence`.

        The wait for the first batch of an epoch is part of `data_wait_s`.
        """
        every = (self.ordinary, self.special, self.between)
        steps = max(self.ordinary.steps + self.special.steps, 1)
        saves = sum(totals.saves for totals in every)
        saves_s, evaluations_s = (sum(one.phases.get(n, 0.0) for one in every) for n in PERIODIC)
        return {
            "checkpoint_s": lasting_s(saves_s / steps, saves),
            "evaluation_s": evaluations_s / steps,
            "data_wait_s": self.between.phases.get("data_wait", 0.0) / steps,
        }

    @property
    def on_gpu(self) -> bool:
        """Whether the steps run on a GPU."""
        return self.device.startswith("cuda")

    def usage(self) -> dict[str, float | None]:
        """Return what an ordinary step up to now used of the machine, as `Usage.between`."""
        ends = [usage_now()] if len(self._usages) % 2 else []
        every = [*self._usages, *ends]
        spans = list(zip(every[::2], every[1::2], strict=True))
        return Usage.between(spans, self.ordinary.steps)

    @cached_property
    def trace(self) -> Trace | None:
        """The operations of the recorded steps. None if none were recorded."""
        if self.profiler is None:
            return None
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.profiler.export_chrome_trace(f"{folder}/trace.json")
                document = document_in(Path(folder) / "trace.json")
        except (RunFailed, OSError) as error:
            self.notes.append(f"Operations were recorded and could not be read: {error}")
            return None
        trace = read_trace(document, steps=self.recorded_steps)
        if self.on_gpu and not trace.kernels:
            self.notes.append(unprofiled("the driver shows no kernels (CUPTI is not permitted)"))
            return None
        return trace

    def _until_compiled(self) -> Iterator[None]:
        """Warm up until nothing is compiled any more."""
        yield
        first_s, least = time.perf_counter(), MIN_WARM_STEPS
        while self.warm.steps < MAX_WARM_STEPS:
            last_s = time.perf_counter()
            compiles = self._compiled.changed()
            self._compiled.poll()
            long_enough = time.perf_counter() - first_s >= WARM_S or self.warm.steps >= 10
            if self.warm.steps >= least and long_enough and not compiles:
                break
            yield
            least = fewest(MIN_WARM_STEPS, 1, time.perf_counter() - last_s)
        compiler = sys.modules.get("torch._dynamo.utils")
        self.has_compiled = compiler is not None and bool(compiler.get_compilation_metrics())

    def _ordinary(self, goes_on: Callable[[int, float], bool]) -> Iterator[None]:
        """Take ordinary steps while `goes_on(steps, seconds)`."""
        self._wait()
        self.name = "ordinary"
        self._compiled.poll()
        self._usages.append(usage_now())
        began_s, steps = time.perf_counter(), 0
        try:
            while goes_on(steps, time.perf_counter() - began_s):
                yield
                steps += 1
                if self._compiled.changed():
                    found = self._compiled.poll()
                    self.has_compiled = True
                    self.compile_s += found.compile_s
                    self.graphs += found.graphs
                    self.compilations.append(found)
            ended_s = time.perf_counter()
            self._wait()
            self.ordinary.seconds += time.perf_counter() - ended_s
        finally:
            self._usages.append(usage_now())

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Find the lines on which the loop's thread spends its time, and mark rare calls."""
        timer, every_s = self.timer, SAMPLED_EVERY_S
        found = LineSampler(
            lambda: timer.current, thread=timer.thread, interval_s=every_s, workers=self.workers
        )
        if self.sampler is not None:
            found.lines = self.sampler.lines
        with found, self.rare.recording_rare():
            self.sampler = found
            yield

    def _marked_calls(self) -> Iterator[None]:
        """Mark the calls of some steps, and record those in torch."""
        self.name, marked = "marked calls", MarkedCalls()
        self.called_steps = steps = 1 if self.step_s > LONG_S else CALLED_STEPS
        with ExitStack() as stack:
            # a mode would make compiled code compile again. A script's own is not taken off first
            if not (self.has_compiled or torch._C._len_torch_function_stack()):
                work = None if self.on_gpu else Work()
                recorder = CallRecorder(lambda: self.timer.current, work)
                self.recording = stack.enter_context(recorder)
            stack.enter_context(marked.recording())
            for _ in range(steps):
                yield
                if self.recording is not None:
                    self.recording.end_step()
        self.recorder, self.recording = self.recording, None
        self.waits, found = marked.waits(steps, on_gpu=self.on_gpu), marked.lines.sites(steps)
        self.sites |= {kind: found[kind] for kind in ("sync", "copy") if kind in found}

    def _operations(self) -> Iterator[None]:
        """Record the operations of some steps."""
        if not self.recorded_steps:
            return
        if self._recording is None and self.step_s > MAX_TRACED_S:
            self.notes.append(f"A step takes {self.step_s:.0f} s: operations were not recorded.")
            return
        if self.recorder is not None and self.recorder.is_cut:
            self.notes.append(f"A step makes over {MOST_CALLS:,} calls in torch: not recorded.")
            return
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            self.notes.append("Another profiler is active, so operations were not recorded.")
            return
        silence_profiler()
        self._wait()
        self.name = "recorded"
        with ExitStack() as stack:
            stack.enter_context(phase_ranges(self.timer))  # the open ones end when it has ended
            try:
                profiler = stack.enter_context(profiling(self.device))
            except RuntimeError as error:  # it is not permitted
                self.notes.append(unprofiled(str(error)))
                return
            others = stack.enter_context(giving_way(stack))
            for _ in range(self.recorded_steps):
                with record_function(f"{PREFIX}step {self.next_step}"):
                    pass  # only its start: ranges that end later may be open
                yield
            if others:
                self.notes.append("Another profiler has started, so operations were not recorded.")
                return
            ended_s = time.perf_counter()
            self._wait()
            self.special.seconds += time.perf_counter() - ended_s
        self.profiler = profiler

    def _recorded(self, asked: Recording) -> Iterator[None]:
        """Record the steps that were asked for, after as many ordinary ones."""
        ordinary = asked.steps
        if asked.skip is None:
            yield from self._until_compiled()
        else:
            ordinary = min(asked.steps, max(asked.skip - 2, 0))
            yield from (None for _ in range(asked.skip - 1 - ordinary))
        if ordinary:
            yield from self._ordinary(lambda steps, seconds: steps < ordinary)
        self.first_recorded = self.next_step
        yield from self._operations()
        if self.profiler is None:  # they are timed without it
            self.name = "recorded"
            self.special = Totals()
            yield from (None for _ in range(asked.steps))
        self.recorded_s = self.special.seconds
        if not self.on_gpu:
            return
        memory: Any = torch.cuda.memory
        self.name = "memory"
        try:
            memory._record_memory_history(max_entries=1_000_000, stacks="python")
            yield
            self._wait()
            memory._dump_snapshot(asked.snapshot)
            memory._record_memory_history(enabled=None)
        except (AttributeError, OSError, RuntimeError, TypeError) as error:
            self.notes.append(f"No memory snapshot: {error}")

    def recorded(self) -> Recorded | None:
        """Write the trace of the recorded steps, and return what they took."""
        if self._recording is None or self.recorded_s is None:
            return None
        if self.profiler is not None:
            self.profiler.export_chrome_trace(self._recording.trace)
        return Recorded(
            device=self.device,
            first_step=self.first_recorded,
            seconds=self.recorded_s,
            step_s=self.step_s if self.ordinary.steps else None,
            notes=tuple(self.notes),
        )

    @property
    def next_step(self) -> int:
        """The number of the current step, or of the next one. The first was not seen."""
        return self.warm.steps + self.ordinary.steps + self.special.steps + 2

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def fewest(usual: int, steps: int, seconds: float) -> int:
    """Return how many steps are enough: two if those so far were long."""
    return 2 if seconds > LONG_S * max(steps, 1) else usual


def unprofiled(why: str) -> str:
    """Return the note that the profiler could not be used."""
    return (
        f"The profiler could not be used: {why.splitlines()[0] if why else 'unknown reason'}. Step "
        "times and phases were measured without it. Operations by class were not."
    )


@contextmanager
def giving_way(stack: ExitStack) -> Iterator[list[object]]:
    """Close `stack`, which records, when another profiler starts, and return a list of those."""
    others: list[object] = []

    def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
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
