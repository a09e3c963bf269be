"""Profiles some steps of a run: trace, kernels by class, what the device waits for.

The steps are those of the training loop, in this process, with evaluations and saves omitted.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.config
from torch.profiler import record_function

from flatout.assembly.run import Run
from flatout.config.schema import RunConfig
from flatout.display import terminal_text
from flatout.distributed.rendezvous import silence_profiler
from flatout.distributed.spinning import spin_less_beside_others
from flatout.errors import ConfigError
from flatout.hardware.machine import fingerprint
from flatout.measure.output import claim
from flatout.measure.profile.result import PHASES, Profile
from flatout.measure.resolving import resolve_here
from flatout.measure.steps.steady import is_steady
from flatout.measure.steps.trace import (
    PREFIX,
    STEP,
    Trace,
    exported,
    phase_ranges,
    profiling,
    read_trace,
)
from flatout.measure.steps.windows import unprofiled
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
MIN_WARM_STEPS = 3
"""Fewest steps of a warm-up."""
COLUMNS = 80
"""Columns of profile.txt."""
NOT_PERMITTED = (
    "The driver shows no kernels: it reserves profiling for administrators. Step times and "
    "the trace of the host are complete. The table and the device's gaps are missing. Allow it "
    "with the driver option NVreg_RestrictProfilingToAdminUsers=0, or in a container with "
    "--cap-add=SYS_ADMIN."
)


def run_profile(
    requested: RunConfig,
    *,
    steps: int = 3,
    skip: int | None = None,
    out: Path | None = None,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Profile:
    """Profile some steps of a recipe, write the files to a directory, and return the profile.

    `skip` are the steps before them. None means until the step time is steady.

    Raises: UsageError before anything is measured; OutOfMemory; RunFailed when the files cannot be
            written.
    """
    require_one_process("profile")
    silence_profiler()
    out = out or PROFILES / run_name(requested)
    with progress.task("Resolving the configuration"):
        resolved = resolve_here(requested.with_values(QUIET), cache)
    config = long_enough(resolved.config, steps, skip)
    claim(out)
    if config.train.device == "cpu":
        spin_less_beside_others(progress)
    with ExitStack() as stack:
        stack.enter_context(writing_run(out))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=out, prefix=".steps-")))
        with progress.task("Building the model"):
            run = resolved.build(config, scratch)
        stack.enter_context(closing(run.loader))
        run.loader.prime(min(needed(steps, skip), run.last_step))
        stack.enter_context(explained(run))
        # compiled kernels of a CPU then have names in the trace
        stack.enter_context(torch._inductor.config.patch({"cpp.enable_kernel_profile": True}))
        with Log(run, progress=progress) as log, progress.task(f"Profiling {steps} steps"):
            warm_up(run, log)
            found = Measured()
            turns = course(run, log.clock.timer, steps, skip, out / SNAPSHOT, found)
            with closing(turns):
                fit(Session(run, log, lambda _run: next(turns, run) is run))
                next(turns, None)  # the run may end before it asks again
        with progress.task("Reading the trace"):
            profile = summarise(run, found, steps, scratch / "raw.json", out)
        write_text(out / FIGURES, profile.model_dump_json(indent=1) + "\n")
        write_text(out / TEXT, terminal_text(profile.display(), COLUMNS) + "\n")
    return profile


def needed(steps: int, skip: int | None) -> int:
    """Return the steps that a profile takes at least. On a GPU, the last is for its memory."""
    return MIN_WARM_STEPS + 2 * steps + 1 if skip is None else skip + steps


def long_enough(config: RunConfig, steps: int, skip: int | None) -> RunConfig:
    """Return the configuration with enough steps for a profile that did not choose its steps.

    Raises: ConfigError when the chosen steps are beyond the end of the run.
    """
    planned, last = config.train.steps or 0, needed(steps, skip)
    if last <= planned:
        return config
    if skip is None:
        return config.with_values({"train.steps": last})
    which = f"Step {last} does" if steps == 1 else f"Steps {skip + 1} to {last} do"
    most = planned - steps
    choice = f"Use --skip {most} or less" if most >= 0 else "Remove --skip"
    raise ConfigError(
        f"{which} not exist: the run has {planned} step{'s' * (planned != 1)}.",
        fix=f"{choice}, or set train.steps={last}.",
    )


@dataclass
class Measured:
    """What the profiled run has measured so far."""

    first_step: int = 1
    """The first profiled step, from 1."""
    step_s: float | None = None
    """An average step without the profiler."""
    phases: dict[str, float] = field(default_factory=dict)
    """The host's seconds by phase in such a step."""
    profiled_s: float = 0.0
    """Seconds of all profiled steps."""
    profiler: torch.profiler.profile | None = None
    has_snapshot: bool = False
    """Whether torch's memory snapshot was written."""
    notes: list[str] = field(default_factory=list)


def course(
    run: Run, timer: PhaseTimer, steps: int, skip: int | None, snapshot: Path, found: Measured
) -> Generator[None, None, None]:
    """Yield before each step of a profile: a warm-up, ordinary steps, and the profiled ones.

    The ordinary steps show what the profiler costs. On a GPU, one more step writes where each block
    of its memory was allocated.
    """
    device, ordinary = str(run.mesh.device), steps
    on_gpu = device.startswith("cuda")

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    warm: list[float] = []
    if skip is None:
        while run.step + 2 * steps + 1 < run.last_step and (
            len(warm) < MIN_WARM_STEPS or (not is_steady(warm) and sum(warm[1:]) <= MAX_WARM_S)
        ):
            began_s = now()
            yield
            warm.append(now() - began_s)
    else:
        ordinary = min(steps, max(skip - 1, 0))
        yield from (None for _ in range(skip - ordinary))
    if ordinary:
        began_s, before = now(), dict(timer.seconds)
        yield from (None for _ in range(ordinary))
        found.step_s = (now() - began_s) / ordinary
        spent = {name: s - before.get(name, 0.0) for name, s in timer.seconds.items()}
        found.phases = {name.removesuffix("_wait"): s / ordinary for name, s in spent.items()}
    found.first_step = run.step + 1
    with ExitStack() as stack:
        try:
            with profiling(device):  # its first start takes seconds
                torch.ones(1, device=device).add_(1)
            found.profiler = stack.enter_context(profiling(device, record_shapes=True))
            stack.enter_context(phase_ranges(timer))
        except RuntimeError as error:  # not permitted
            found.notes.append(unprofiled(str(error)))
        began_s = now()
        for _ in range(steps):
            with record_function(f"{PREFIX}{STEP} {run.step + 1}"):
                yield
        found.profiled_s = now() - began_s
    if not on_gpu or run.step >= run.last_step:
        return
    memory: Any = torch.cuda.memory
    try:
        memory._record_memory_history(max_entries=1_000_000, stacks="python")
    except (AttributeError, RuntimeError, TypeError) as error:
        found.notes.append(f"No memory snapshot: {error}")
        return
    try:
        yield
        now()
        memory._dump_snapshot(str(snapshot))
        found.has_snapshot = True
    finally:
        memory._record_memory_history(enabled=None)


def summarise(run: Run, found: Measured, steps: int, raw: Path, out: Path) -> Profile:
    """Return the profile of the steps that were taken. Write their trace to `out`.

    Raises: RunFailed when the profiler could not write its trace.
    """
    device, phases = str(run.mesh.device), found.phases
    profile = Profile(
        path=str(out),
        trace=str(out / TRACE) if found.profiler else None,
        snapshot=str(out / SNAPSHOT) if found.has_snapshot else None,
        recipe=run.config.name,
        device=device,
        arithmetic=run.arithmetic,
        speedups=tuple(run.speedups),
        environment=fingerprint(device),
        first_step=found.first_step,
        steps=steps,
        step_ms=found.step_s and 1e3 * found.step_s,
        profiled_step_ms=1e3 * found.profiled_s / steps,
        phases_ms={name: 1e3 * phases[name] for name in PHASES if name in phases} or None,
        notes=tuple(found.notes),
    )
    if found.profiler is None:
        return profile
    document = exported(found.profiler, raw)
    packed = gzip.compress(json.dumps(document).encode(), compresslevel=6)
    with CheckedFile(out / TRACE) as file:
        file.write(np.frombuffer(packed, np.uint8))
    return with_trace(profile, read_trace(document, steps=steps))


def with_trace(profile: Profile, trace: Trace) -> Profile:
    """Return a profile with what its trace shows."""
    if profile.device != "cpu" and not trace.kernels:
        return profile.model_copy(update={"notes": (*profile.notes, NOT_PERMITTED)})
    table = trace.table()
    busy_s = trace.busy_s() or sum(row.seconds for row in table)
    outside_ms = max(profile.profiled_step_ms - 1e3 * busy_s, 0.0)
    return profile.model_copy(update={"table": table, "outside_ms": outside_ms})
