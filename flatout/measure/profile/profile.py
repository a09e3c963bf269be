"""Profiles some steps of a run: trace, memory, kernels by class, the timeline of a step.

The steps are those of the training loop, in this process, with evaluations and saves left out.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import torch._inductor.config

from flatout.assembly.run import Run
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError
from flatout.files import write_text, writing_run
from flatout.measure.profile.marks import Marks
from flatout.measure.profile.report import Profile, text_of
from flatout.measure.profile.results import summarise
from flatout.measure.profile.run import Taken, Wanted, Windows
from flatout.measure.trials.resolving import resolve_here
from flatout.measure.trials.results import claim
from flatout.measure.trials.rounds import require_one_process
from flatout.measure.trials.workload import QUIET
from flatout.parallel.rendezvous import silence_profiler
from flatout.progress import SILENT, Progress
from flatout.training.loop import fit
from flatout.training.metrics.log import Log
from flatout.training.out_of_memory import explained
from flatout.training.run import warn_of_busy_cores
from flatout.training.run_dir.layout import run_name
from flatout.training.session import Session
from flatout.training.warmup import warm_up

PROFILES = Path("profile")
"""Where profiles are written without `--out`."""
FIGURES, TEXT = "profile.json", "profile.txt"
SNAPSHOT = "memory-snapshot.pickle"
"""torch's own file, for pytorch.org/memory_viz; flatout never reads it."""


def run_profile(
    requested: RunConfig,
    *,
    wanted: Wanted,
    out: Path | None = None,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> tuple[Profile, Path]:
    """Profile a recipe, and return the profile and the directory with its files.

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
        warn_of_busy_cores(resolved.machine, progress)
    with ExitStack() as stack:
        stack.enter_context(writing_run(out))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=out, prefix=".steps-")))
        with progress.task("Building the model"):
            run = resolved.build(config, scratch)
        stack.enter_context(closing(run.feed))
        raw = scratch / "raw.json"
        with explained(run):
            taken = take_steps(run, wanted, raw, out / SNAPSHOT, progress)
        with progress.task("Reading the trace"):
            profile = summarise(run, taken, raw, out)
        write_text(out / FIGURES, profile.model_dump_json(indent=1) + "\n")
        write_text(out / TEXT, text_of(profile) + "\n")
    return profile, out


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
    choice = f"Use --skip {most} or less" if most >= 0 else "Leave out --skip"
    raise ConfigError(
        f"{which} not exist: the run has {planned} step{'s' * (planned != 1)}.",
        fix=f"{choice}, or set train.steps={last}.",
    )


def take_steps(run: Run, wanted: Wanted, raw: Path, snapshot: Path, progress: Progress) -> Taken:
    """Train through the warm-up and the profiled steps."""
    marks = Marks(run)
    windows = Windows(run, marks, wanted, raw, snapshot)
    run.feed.prime(min(wanted.at_least, run.last_step))
    # compiled kernels of a CPU then have names in the trace
    named_kernels = torch._inductor.config.patch({"cpp.enable_kernel_profile": True})
    with Log(run, progress=progress) as log, named_kernels:
        warm_up(run, log)
        marks.attach()
        with progress.task(f"Profiling {wanted.steps} steps"):
            try:
                fit(Session(run, log, windows.requested))
                windows.finish()
            finally:
                windows.close()
    return windows.taken
