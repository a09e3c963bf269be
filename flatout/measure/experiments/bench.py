"""Measures a ladder or a sweep: interleaved repeats, each trial in a fresh process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from flatout.config.schema import RunConfig
from flatout.errors import RunFailed
from flatout.measure.experiments.ladder import LADDER, ladder_experiment
from flatout.measure.experiments.losses import DETERMINISTIC_STEPS, Trials
from flatout.measure.experiments.records import Row
from flatout.measure.experiments.report import Bench
from flatout.measure.experiments.resolving import resolve_apart
from flatout.measure.experiments.results import (
    TRIALS,
    claim,
    facts_of,
    keep,
    remember,
    results_dir,
    write,
)
from flatout.measure.experiments.schedule import (
    Budget,
    Experiment,
    RunTrial,
    Schedule,
    require_one_process,
)
from flatout.measure.experiments.sweep import sweep_experiment
from flatout.measure.experiments.trial import run_trial
from flatout.progress import SILENT, Progress
from flatout.training.run import warn_of_busy_cores


def run_bench(
    requested: RunConfig,
    *,
    minutes: float | None = None,
    repeats: int | None = None,
    sweep: str | None = None,
    out: Path | None = None,
    progress: Progress = SILENT,
    cache: Path | None = None,
    trial: RunTrial = run_trial,
    clock: Callable[[], float] = time.monotonic,
) -> Bench:
    """Measure the ladder of a recipe, or a sweep, and return what was found.

    bench.json, table.md and bench.svg are written to its directory, and each trial to trials.jsonl
    when it ends. After an interruption, the trials so far are evaluated and written. Gains are also
    kept in `cache` unless that is None.
    Raises: UsageError before anything is measured; RunFailed when nothing could be measured;
            Interrupted when a signal arrives before anything was measured.
    """
    start_s, began = clock(), datetime.now().astimezone().isoformat(timespec="seconds")
    require_one_process("bench")
    out = results_dir(requested, sweep or LADDER, out)
    with progress.task("Resolving the configuration"):
        resolved, additions = resolve_apart(requested, cache)
    if resolved.config.train.device == "cpu":
        warn_of_busy_cores(resolved.machine, progress)
    experiment = (
        sweep_experiment(sweep, requested, resolved)
        if sweep
        else ladder_experiment(requested, resolved, additions)
    )
    num_points = len(experiment.points) + len(experiment.extras)
    budget = Budget(num_points, minutes=minutes, repeats=repeats, began_s=start_s, clock=clock)
    claim(out)
    label, trials = (
        [requested.name, experiment.kind, requested.digest()],
        Trials.of(resolved.config),
    )
    schedule = Schedule(
        requested, trials, budget, trial, lambda ended: keep(ended, label, began, out)
    )
    with schedule.running(progress, "Measuring"):
        schedule.run(experiment)
    require_figures(schedule, out)
    rows = experiment.rows(trials)
    total = trials.gain(*experiment.total, experiment.total[1]) if experiment.total else None
    found = Bench(
        **facts_of(requested, resolved, schedule),
        path=str(out),
        kind=experiment.kind,
        config=requested.to_dict(),
        config_digest=requested.digest(),
        began=began,
        wall_s=round(clock() - start_s, 1),
        minutes=minutes,
        repeats=max(each.round for each in trials.done) + 1,
        notes=notes(experiment, schedule, rows),
        rungs=rows,
        total_speedup=total and total.median,
        total_speedup_low=total and total.low,
        total_speedup_high=total and total.high,
    )
    write(found, progress)
    remember(found, resolved, cache, progress)
    return found


def require_figures(schedule: Schedule, out: Path) -> None:
    """Check that at least one trial gave figures.

    Raises: Interrupted after a signal; otherwise RunFailed, with the result of the first trial.
    """
    trials = schedule.trials
    if any(trial.result.is_ok for trial in trials.done):
        return
    if not trials.done:
        with suppress(OSError):  # it may contain the files of an earlier bench
            out.rmdir()
    schedule.require_uninterrupted()
    if not trials.done:
        raise RunFailed(
            f"Nothing was measured: {trials.stopped_by} before a trial had ended.",
            fix="Run it again with more time.",
        )
    first = trials.done[0]
    raise RunFailed(
        f"Nothing was measured: {first.point}: {first.result.reason} "
        f"All failures are in {out / TRIALS}.",
        fix="Give it more --minutes."
        if first.result.status == "timed-out"
        else "Try the same recipe with `flatout train`.",
    )


def notes(experiment: Experiment, schedule: Schedule, rows: Sequence[Row]) -> list[str]:
    """Return notes for the reader on how the figures were measured."""
    found, done = [], schedule.trials.done
    is_complete = schedule.ended_by_signal is None
    if not is_complete:
        found.append("The bench was interrupted; these are the trials that had ended by then.")
    counts = [row.repeats for row in rows if row.repeats]
    if counts and min(counts) < max(counts):
        found.append(
            f"Not every line has {max(counts)} repeats: the time was up, or one failed. "
            "n is the number of repeats."
        )
    if is_complete and any(row.is_unreached for row in rows):
        leave_out = ", or leave some out: speedups=auto,-NAME" if experiment.kind == LADDER else ""
        found.append(f"There was not enough time for all: add --minutes{leave_out}.")
    if any(trial.deterministic for trial in done):
        found.append(
            "Two runs of one command differ in their last bits here, so exact promises were "
            f"checked on {DETERMINISTIC_STEPS} steps of separate, untimed runs with "
            "train.deterministic=true."
        )
    timed = [trial.result for trial in done if trial.result.is_ok and not trial.deterministic]
    if timed:
        steps = statistics.median(result.measured_steps or 0 for result in timed)
        before = statistics.median(result.warmup_steps or 0 for result in timed)
        found.append(f"A trial measures {steps:.0f} steps after {before:.0f} of warm-up (medians).")
        unsteady = sum(result.settled is False for result in timed)
        if unsteady:
            found.append(
                f"In {unsteady} of {len(timed)} trials the step time was not yet steady when the "
                "warm-up had to end."
            )
    return found
