"""Profiles some steps of a run: trace, kernels by class, what the device waits for.

The steps are those of the training loop, in this process, with evaluations and saves omitted.
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.config
from torch.profiler import record_function

from flatout.assembly.run import Run
from flatout.config.schema import RunConfig
from flatout.distributed.rendezvous import silence_profiler
from flatout.distributed.spinning import spin_less_beside_others
from flatout.errors import ConfigError
from flatout.hardware.machine import fingerprint
from flatout.measure.output import claim
from flatout.measure.profile.report import PHASES, Gap, Profile
from flatout.measure.resolving import resolve_here
from flatout.measure.steps.trace import PREFIX, STEP, Range, Trace, exported, profiling, read_trace
from flatout.measure.steps.windows import MIN_WARM_STEPS, Windows, unprofiled
from flatout.measure.trial import QUIET, require_one_process
from flatout.progress import SILENT, Progress
from flatout.storage.files import CheckedFile, write_text, writing_run
from flatout.training.loop import fit
from flatout.training.metrics.log import Log
from flatout.training.metrics.phases import PhaseTimer
from flatout.training.out_of_memory import explained
from flatout.training.run_dir.resume import run_name
from flatout.training.session import Session
from flatout.training.warmup import warm_up

PROFILES = Path("profile")
"""Where profiles are written without `--out`."""
FIGURES, TEXT, TRACE = "profile.json", "profile.txt", "trace.json.gz"
SNAPSHOT = "memory-snapshot.pickle"
"""torch's own file, for pytorch.org/memory_viz, which flatout never reads."""
MAX_WARM_S = 10.0
"""Latest end of a warm-up without `--skip`, after its first step."""
MAX_GAPS = 3
"""Most gaps of the device that are listed."""
NOT_PERMITTED = (
    "The driver shows no kernels: it reserves profiling for administrators. Step times and "
    "the trace of the host are complete. The table and the device's gaps are missing. Allow it "
    "with the driver option NVreg_RestrictProfilingToAdminUsers=0, or in a container with "
    "--cap-add=SYS_ADMIN."
)


@dataclass(frozen=True)
class Wanted:
    """Which steps to profile."""

    steps: int
    skip: int | None
    """Steps before them. None means until the step time is steady."""

    @property
    def at_least(self) -> int:
        """Fewest steps that the run must have."""
        if self.skip is not None:
            return self.skip + self.steps
        return MIN_WARM_STEPS + 2 * self.steps + 1  # the last for a memory snapshot


def run_profile(
    requested: RunConfig,
    *,
    wanted: Wanted,
    out: Path | None = None,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Profile:
    """Profile a recipe, write its files to a directory, and return the profile.

    Raises: UsageError before anything is measured; OutOfMemory; RunFailed when the files cannot be
            written.
    """
    require_one_process("profile")
    silence_profiler()
    out = out or PROFILES / run_name(requested)
    with progress.task("Resolving the configuration"):
        resolved = resolve_here(requested.with_values(QUIET), cache)
    config = long_enough(resolved.config, wanted)
    claim(out)
    if config.train.device == "cpu":
        spin_less_beside_others(progress)
    with ExitStack() as stack:
        stack.enter_context(writing_run(out))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=out, prefix=".steps-")))
        with progress.task("Building the model"):
            run = resolved.build(config, scratch)
        stack.enter_context(closing(run.loader))
        run.loader.prime(min(wanted.at_least, run.last_step))
        stack.enter_context(explained(run))
        # compiled kernels of a CPU then have names in the trace
        stack.enter_context(torch._inductor.config.patch({"cpp.enable_kernel_profile": True}))
        with Log(run, progress=progress) as log:
            warm_up(run, log)
            windows = ProfileWindows(run, log.clock.timer, wanted, out / SNAPSHOT)
            with progress.task(f"Profiling {wanted.steps} steps"), closing(windows):
                fit(Session(run, log, windows.requested))
                windows.requested(run)  # the run may end before it asks again
        with progress.task("Reading the trace"):
            profile = summarise(run, windows, scratch / "raw.json", out)
        write_text(out / FIGURES, profile.model_dump_json(indent=1) + "\n")
        write_text(out / TEXT, profile.text() + "\n")
    return profile


def long_enough(config: RunConfig, wanted: Wanted) -> RunConfig:
    """Return the configuration with enough steps for a profile that did not choose its steps.

    Raises: ConfigError when the chosen steps are beyond the end of the run.
    """
    planned = config.train.steps or 0
    if wanted.at_least <= planned:
        return config
    if wanted.skip is None:
        return config.with_values({"train.steps": wanted.at_least})
    first, last = wanted.skip + 1, wanted.at_least
    which = f"Step {last} does" if first == last else f"Steps {first} to {last} do"
    most = planned - wanted.steps
    choice = f"Use --skip {most} or less" if most >= 0 else "Remove --skip"
    raise ConfigError(
        f"{which} not exist: the run has {planned} step{'s' * (planned != 1)}.",
        fix=f"{choice}, or set train.steps={last}.",
    )


class ProfileWindows(Windows):
    """Decides when the run stops: after a warm-up, ordinary steps, and those under the profiler.

    The ordinary steps show what the profiler costs.
    """

    def __init__(self, run: Run, timer: PhaseTimer, wanted: Wanted, snapshot: Path) -> None:
        super().__init__(timer, str(run.mesh.device))
        self.first_step = 1
        """The first profiled step, from 1."""
        self.has_snapshot = False
        """Whether torch's memory snapshot was written."""
        self.profiled_s = 0.0
        """Seconds of all profiled steps."""
        self._run, self.wanted, self._snapshot = run, wanted, snapshot
        self._range = ExitStack()

    def requested(self, run: Run) -> bool:
        """Return whether to stop. The loop calls it before each step."""
        self._range.close()
        goes_on = self.start_step()
        if self.name == "recorded":
            self._range.enter_context(record_function(f"{PREFIX}{STEP} {run.step + 1}"))
        return not goes_on

    def close(self) -> None:
        """End the current window, and the range of its step."""
        self._range.close()
        super().close()

    def _windows(self) -> Generator[None, None, None]:
        wanted, ordinary = self.wanted, self.wanted.steps
        if wanted.skip is None:
            for _ in self._until_steady(MAX_WARM_S):
                if self._run.step + 2 * wanted.steps + 1 >= self._run.last_step:
                    break
                yield
        else:
            ordinary = min(wanted.steps, max(wanted.skip - 1, 0))
            yield from (None for _ in range(wanted.skip - ordinary))
        if ordinary:
            yield from self._ordinary(lambda steps, seconds: steps < ordinary)
        self.first_step = self._run.step + 1
        try:
            with profiling(self.device):  # its first start takes seconds
                torch.ones(1, device=self.device).add_(1)
            yield from self._recorded(wanted.steps, longest_s=math.inf, record_shapes=True)
        except RuntimeError as error:  # not permitted
            self.notes.append(unprofiled(str(error)))
        self.name = "profiled"
        if self.profiler is None:
            yield from (None for _ in range(wanted.steps - self.special.steps))
        self.profiled_s = self.special.seconds
        if self.on_gpu and self._run.step < self._run.last_step:
            yield from self._with_snapshot()

    def _with_snapshot(self) -> Generator[None, None, None]:
        """Take one more step, and write where each block of it was allocated."""
        memory: Any = torch.cuda.memory
        try:
            memory._record_memory_history(max_entries=1_000_000, stacks="python")
        except (AttributeError, RuntimeError, TypeError) as error:
            self.notes.append(f"No memory snapshot: {error}")
            return
        try:
            yield
            self._wait()
            memory._dump_snapshot(str(self._snapshot))
            self.has_snapshot = True
        finally:
            memory._record_memory_history(enabled=None)


def summarise(run: Run, windows: ProfileWindows, raw: Path, out: Path) -> Profile:
    """Return the profile of the steps that were taken. Write their trace to `out`.

    Raises: RunFailed when the profiler could not write its trace.
    """
    ordinary, steps = windows.ordinary, windows.wanted.steps
    phases = {name.removesuffix("_wait"): s for name, s in ordinary.per_step().items()}
    profile = Profile(
        path=str(out),
        trace=str(out / TRACE) if windows.profiler else None,
        snapshot=str(out / SNAPSHOT) if windows.has_snapshot else None,
        recipe=run.config.name,
        device=windows.device,
        arithmetic=run.arithmetic,
        speedups=tuple(run.speedups),
        environment=fingerprint(windows.device),
        first_step=windows.first_step,
        steps=steps,
        step_ms=1e3 * ordinary.seconds / ordinary.steps if ordinary.steps else None,
        profiled_step_ms=1e3 * windows.profiled_s / steps,
        phases_ms={name: 1e3 * phases[name] for name in PHASES if name in phases} or None,
        notes=tuple(windows.notes),
    )
    if windows.profiler is None:
        return profile
    document = exported(windows.profiler, raw)
    packed = gzip.compress(json.dumps(document).encode(), compresslevel=6)
    with CheckedFile(out / TRACE) as file:
        file.write(np.frombuffer(packed, np.uint8))
    return with_trace(profile, read_trace(document, steps=steps))


def with_trace(profile: Profile, trace: Trace) -> Profile:
    """Return a profile with what its trace shows."""
    on_gpu = profile.device != "cpu"
    if on_gpu and not trace.kernels:
        return profile.model_copy(update={"notes": (*profile.notes, NOT_PERMITTED)})
    table = trace.table()
    busy_s = trace.busy_s() or sum(row.seconds for row in table)
    outside_ms = max(profile.profiled_step_ms - 1e3 * busy_s, 0.0)
    found: dict[str, Any] = {"table": table, "outside_ms": outside_ms}
    if on_gpu and trace.step_ranges:  # the step with the median duration
        step = sorted(trace.step_ranges, key=lambda one: one.seconds)[len(trace.step_ranges) // 2]
        gaps = gaps_of(trace, step)
        found["gaps"] = gaps[:MAX_GAPS]
        found["device_idle"] = sum(gap.seconds for gap in gaps) / step.seconds
    return profile.model_copy(update=found)


def gaps_of(trace: Trace, step: Range) -> tuple[Gap, ...]:
    """Return all times of a step at which no kernel runs, the longest first."""
    edges = [(step.start_s, step.start_s)]
    for op in sorted(trace.kernels, key=lambda op: op.start_s):
        if op.end_s > step.start_s and op.start_s < step.end_s:
            start_s, end_s = edges[-1]
            if op.start_s <= end_s:
                edges[-1] = (start_s, max(op.end_s, end_s))
            else:
                edges.append((op.start_s, op.end_s))
    found: list[Gap] = []
    for (_, start_s), (end_s, _) in pairwise([*edges, (step.end_s, step.end_s)]):
        middle_s = (start_s + end_s) / 2
        host = (o for o in trace.ops if o.parent is None and o.start_s <= middle_s <= o.end_s)
        if end_s > start_s:
            found.append(
                Gap(
                    start_s=start_s - step.start_s,
                    seconds=end_s - start_s,
                    phase=trace.phase_at(middle_s),
                    host_op=next((op.name for op in host), None),
                )
            )
    return tuple(sorted(found, key=lambda gap: -gap.seconds))
