"""`diagnose`: measures a recipe, or reads a run, and returns the diagnosis with its evidence."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from flatout.config.schema import RunConfig
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.diagnose.process import measure_apart
from flatout.measure.diagnose.recorded import recorded_evidence
from flatout.measure.diagnose.spec import MeasureSpec
from flatout.measure.runlog import RunLog
from flatout.measure.steps.evidence import Evidence, HostFacts
from flatout.progress import SILENT, Progress
from flatout.training.metrics.observers import Observer

DEFAULT_SECONDS = 4.0
"""Seconds of ordinary steps that are measured."""
LIMIT_S = 150.0
"""Longest measured run before it counts as hanging; more seconds of steps extend it."""


@dataclass(frozen=True)
class Measured:
    """A diagnosis with the evidence behind it."""

    evidence: Evidence
    diagnosis: Diagnosis


def diagnose_recipe(
    config: RunConfig,
    *,
    seconds: float = DEFAULT_SECONDS,
    cache: Path | None = None,
    callbacks: Sequence[Observer] = (),
    progress: Progress = SILENT,
) -> Measured:
    """Check a configuration on this machine, run it for some seconds, and return the diagnosis.

    No step is taken when something already known keeps the run from starting. The run has a process
    of its own, unless there are callbacks, which only exist in this one.
    Raises: UsageError when the configuration cannot be resolved; RunFailed.
    """

    def on_preflight(evidence: Evidence) -> bool:
        stops = any(finding.harm == "fails" for finding in diagnosis_of(evidence).findings)
        if not stops:
            progress.say("Nothing keeps the run from starting; measuring its steps.")
        return not stops

    with scratch_folder(config) as folder:
        spec = MeasureSpec(
            config=config.to_dict(),
            folder=str(folder),
            cache=None if cache is None else str(cache),
            seconds=seconds,
            limit_s=LIMIT_S + 6 * seconds,
        )
        with progress.task("Measuring (about half a minute)"):
            evidence = (
                _measure_here(spec, on_preflight, callbacks)
                if callbacks
                else measure_apart(spec, on_preflight)
            )
    return Measured(evidence, diagnosis_of(evidence))


def _measure_here(
    spec: MeasureSpec, on_preflight: Callable[[Evidence], bool], callbacks: Sequence[Observer]
) -> Evidence:
    from flatout.measure.diagnose.preflight import prepare
    from flatout.measure.diagnose.run import measured

    prepared = prepare(spec)
    if not on_preflight(prepared.evidence) or prepared.resolved is None:
        return prepared.evidence
    return measured(spec, prepared, callbacks)


def diagnose_run(folder: Path) -> Measured:
    """Return the diagnosis of a recorded run.

    Raises: CheckpointError when it has recorded nothing.
    """
    evidence = recorded_evidence(folder)
    evidence = evidence.model_copy(update={"host": recorded_cores(folder)})
    return Measured(evidence, diagnosis_of(evidence))


def recorded_cores(folder: Path) -> HostFacts:
    """Return how busy other processes kept the cores of a recorded run.

    `other_busy_cores` is the mean of the windows in which they left too few for the run's threads,
    if there are any, and `busy_share` is the share of these windows in the recorded time.
    """
    log = RunLog(folder)
    starts = [event for event in log.events if event["event"] in ("start", "resume")]
    environment = starts[-1].get("environment") if starts else None
    threads = environment.get("threads") if isinstance(environment, dict) else None
    threads = threads if isinstance(threads, int) and threads > 0 else 1
    windows: list[tuple[float, float, float]] = []  # others, cores, seconds
    since_s = 0.0
    for record in log.records():
        at_s = record.get("elapsed_s", 0.0)
        if {"cpu/other_cores", "cpu/cores"} <= record.keys() and at_s > since_s:
            windows.append((record["cpu/other_cores"], record["cpu/cores"], at_s - since_s))
            since_s = at_s
    if not windows:
        return HostFacts()
    others, cores, seconds = zip(*windows, strict=True)
    busy = [one for one in windows if one[0] + threads > one[1]]
    if not busy:
        return HostFacts(other_busy_cores=fmean(others, seconds))
    others, cores, busy_s = zip(*busy, strict=True)
    return HostFacts(
        cores=int(cores[-1]),
        threads=threads,
        other_busy_cores=fmean(others, busy_s),
        busy_share=sum(busy_s) / sum(seconds),
    )


def measure_briefly(config: RunConfig, *, seconds: float = DEFAULT_SECONDS) -> Evidence:
    """Return the step time of a configuration, with its saves and evaluations.

    Raises: UsageError, RunFailed.
    """
    with scratch_folder(config) as folder:
        return measure_apart(
            MeasureSpec(
                config=config.to_dict(),
                folder=str(folder),
                seconds=seconds,
                limit_s=LIMIT_S + 6 * seconds,
                brief=True,
            )
        )


@contextmanager
def scratch_folder(config: RunConfig) -> Iterator[Path]:
    """Make a directory on the disk of the run's checkpoints, and remove it at the end."""
    root = Path(config.checkpoint.dir or "runs")
    while not root.is_dir():
        root = root.parent
    folder = Path(tempfile.mkdtemp(prefix=".diagnose-", dir=root))
    try:
        yield folder / "run"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
