"""Takes the steps of a profile: warm-up, ordinary steps, then the steps under the profiler.

The training loop asks before each step whether to stop; each question moves the windows forward by
one step. The ordinary steps show what the profiler costs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.assembly.run import Run
from flatout.measure.profile.marks import Blocks, Marks, blocks
from flatout.measure.profile.memory import Named
from flatout.measure.steps.trace import profiling
from flatout.measure.trials.pace import is_steady

MIN_WARM_STEPS = 3
"""Fewest steps of a warm-up without `--skip`."""
MAX_WARM_S = 10.0
"""Latest end of such a warm-up, after its first step."""


@dataclass(frozen=True)
class Wanted:
    """Which steps to profile."""

    steps: int
    skip: int | None
    """Steps before them; None: until the step time is steady."""

    @property
    def at_least(self) -> int:
        """Fewest steps that the run must have."""
        if self.skip is not None:
            return self.skip + self.steps
        return MIN_WARM_STEPS + 2 * self.steps + 1  # the last for a memory snapshot


@dataclass
class Taken:
    """What the steps have shown."""

    first_step: int | None = None
    """The first profiled step, from 1."""
    steps: int = 0
    """Profiled steps."""
    is_traced: bool = False
    """Whether the profiler could be used."""
    step_s: float | None = None
    """Seconds of an average ordinary step; None when there were none."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the host by phase in an average ordinary step."""
    profiled_s: float = 0.0
    """Seconds of all profiled steps."""
    named: Named | None = None
    has_snapshot: bool = False
    """Whether torch's memory snapshot was written."""
    notes: list[str] = field(default_factory=list)


class Windows:
    """Decides when the run stops, and keeps what its windows have shown."""

    def __init__(self, run: Run, marks: Marks, wanted: Wanted, raw: Path, snapshot: Path) -> None:
        self.taken = Taken()
        self._run, self._marks, self._wanted = run, marks, wanted
        self._raw, self._snapshot = raw, snapshot
        self._device = run.mesh.device
        self._course = self._windows()

    def requested(self, run: Run) -> bool:
        """Return whether to stop; the loop calls it before each step."""
        self._marks.end_step()
        if next(self._course, False) is False:
            return True
        self._marks.start_step(run.step + 1)
        return False

    def finish(self) -> None:
        """End the last window when the run has ended before it asked again."""
        self._marks.end_step()
        next(self._course, False)

    def close(self) -> None:
        """End the current window, after an error."""
        self._marks.end_step()
        self._course.close()

    def _windows(self) -> Generator[bool, None, None]:
        wanted = self._wanted
        ordinary = wanted.steps
        if wanted.skip is None:
            yield from self._until_steady()
        else:
            ordinary = min(wanted.steps, max(wanted.skip - 1, 0))
            yield from (True for _ in range(wanted.skip - ordinary))
        if ordinary:
            seconds = yield from self._steps(ordinary)
            self.taken.step_s = seconds / ordinary
            self.taken.phases_s = dict(self._marks.timer.per_step())
        self.taken.first_step = self._run.step + 1
        yield from self._profiled()
        if self._device.type == "cuda" and self._run.step < self._run.last_step:
            yield from self._with_snapshot()

    def _until_steady(self) -> Iterator[bool]:
        times: list[float] = []
        start_s = time.perf_counter()
        while len(times) < MIN_WARM_STEPS or not is_steady(times):
            began_s = time.perf_counter()
            if len(times) >= MIN_WARM_STEPS and began_s - start_s - times[0] > MAX_WARM_S:
                return
            if self._run.step + 2 * self._wanted.steps + 1 >= self._run.last_step:
                return
            yield True
            self._wait()
            times.append(time.perf_counter() - began_s)

    def _steps(self, number: int) -> Generator[bool, None, float]:
        """Take steps and return their seconds."""
        self._wait()
        self._marks.timer.reset()
        start_s = time.perf_counter()
        yield from (True for _ in range(number))
        self._wait()
        seconds = time.perf_counter() - start_s
        self._marks.timer.end_steps()
        return seconds

    def _profiled(self) -> Generator[bool, None, None]:
        taken, marks = self.taken, self._marks
        before = named_memory(self._run)
        profiler: Any = None
        with ExitStack() as stack:
            try:
                start_profiler(str(self._device))
                profiler = stack.enter_context(
                    profiling(
                        str(self._device), record_shapes=True, profile_memory=True, with_flops=False
                    )
                )
            except RuntimeError as error:  # not permitted, or another profiler is active
                taken.notes.append(unprofiled(str(error)))
            marks.recording = profiler is not None
            try:
                taken.profiled_s = yield from self._steps(self._wanted.steps)
            finally:
                marks.end_step()
                marks.recording = False
        taken.named = Named(before, named_memory(self._run), marks.gradients, marks.inputs)
        taken.steps, taken.is_traced = self._wanted.steps, profiler is not None
        if profiler is not None:
            profiler.export_chrome_trace(str(self._raw))

    def _with_snapshot(self) -> Generator[bool, None, None]:
        """Take one more step, and write where each block of it was allocated."""
        memory: Any = torch.cuda.memory
        try:
            memory._record_memory_history(max_entries=1_000_000, stacks="python")
        except (AttributeError, RuntimeError, TypeError) as error:
            self.taken.notes.append(f"No memory snapshot: {error}")
            return
        try:
            yield True
            self._wait()
            memory._dump_snapshot(str(self._snapshot))
            self.taken.has_snapshot = True
        finally:
            memory._record_memory_history(enabled=None)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def start_profiler(device: str) -> None:
    """Start and stop the profiler once: its first start takes seconds.

    The first free of memory that it has not seen makes torch write a warning, which does not
    matter here: memory that existed before the steps is known by its address.
    Raises: RuntimeError when it is not permitted.
    """
    with profiling(device):
        torch.ones(1, device=device).add_(1)
    unseen = torch.ones(64, device=device)
    with muted_stderr(), profiling(device, profile_memory=True):
        del unseen


@contextmanager
def muted_stderr() -> Iterator[None]:
    """Discard what native code writes to standard error inside the block."""
    before = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(sink)


def unprofiled(why: str) -> str:
    """Return the note that the profiler could not be used."""
    return (
        f"The profiler could not be used: {why.splitlines()[0] if why else 'unknown reason'}. "
        "Step times and phases were measured without it; there is no trace and no table."
    )


def named_memory(run: Run) -> dict[str, Blocks]:
    """Return the memory of the run's tensors, by category and address."""
    weights = blocks([*run.core.parameters(), *run.core.buffers()])
    gradients = blocks(one.grad for one in run.core.parameters() if one.grad is not None)
    states = blocks(_states(run))
    for address in {**weights, **gradients}:
        states.pop(address, None)
    return {"weights": weights, "gradients": gradients, "optimizer": states}


def _states(run: Run) -> Iterable[Tensor]:
    """Yield the tensors of the optimizers' states.

    Shapes: any.
    """
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
