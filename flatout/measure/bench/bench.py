"""Measures a ladder or a sweep: interleaved repeats, each trial in a fresh process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from flatout.config.schema import RunConfig
from flatout.errors import RunFailed
from flatout.measure.bench.picture import picture
from flatout.measure.bench.table import table
from flatout.measure.trials.budget import Budget
from flatout.measure.trials.ladder import BASELINE, Ladder, make_ladder, promise_between
from flatout.measure.trials.promises import (
    DETERMINISTIC_STEPS,
    Measured,
    ladder_rows,
    repeats_to_the_bit,
)
from flatout.measure.trials.remember import gains, remember, remember_rate
from flatout.measure.trials.resolving import Resolved, resolve_apart
from flatout.measure.trials.results import (
    PICTURE,
    TRIALS,
    Report,
    Row,
    claim,
    commit_of_package,
    is_less,
    keep,
    results_dir,
    write,
)
from flatout.measure.trials.rounds import (
    Experiment,
    Measurement,
    Point,
    Rounds,
    RunTrial,
    interrupted,
    require_one_process,
    with_speedups,
)
from flatout.measure.trials.statistics import Figure, median_of, spread
from flatout.measure.trials.sweep import require_sweep, sweep_experiment
from flatout.measure.trials.trial import run_trial
from flatout.progress import SILENT, Progress
from flatout.training.run import warn_of_busy_cores

LOSS_STEPS = 20
"""Number of first losses that are compared."""
LADDER = "ladder"


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
) -> tuple[Report, Path]:
    """Measure the ladder of a recipe, or a sweep, and return the report and its directory.

    bench.json, table.md and bench.svg are written there, and each trial to trials.jsonl when it
    ends. After an interruption, the trials so far are evaluated and written. Gains are also kept in
    `cache` unless that is None.
    Raises: UsageError before anything is measured; RunFailed when nothing could be measured;
            Interrupted when a signal arrives before anything was measured.
    """
    start_s, began = clock(), datetime.now().astimezone().isoformat(timespec="seconds")
    require_one_process("bench")
    if sweep is not None:
        require_sweep(sweep)
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
    budget = Budget(
        len(experiment.points) + len(experiment.extras),
        minutes=minutes,
        repeats=repeats,
        began_s=start_s,
        clock=clock,
    )
    claim(out)
    label = [requested.name, experiment.kind, requested.digest()]
    rounds = Measurement(
        experiment, requested, budget, trial, lambda ended: keep(ended, label, began, out), progress
    ).run()
    require_figures(rounds, out)
    wall_s = clock() - start_s
    report = report_of(
        requested, resolved, experiment, rounds, began=began, wall_s=wall_s, minutes=minutes
    )
    _store(report, out, progress)
    if cache is not None:
        device = resolved.config.train.device
        remember(gains(report), resolved.machine, device, cache, progress=progress)
        remember_rate(report, resolved, cache)
    return report, out


def _store(report: Report, out: Path, progress: Progress) -> None:
    """Write the report, unless the directory has one with more trials."""
    if is_less(report, out):
        progress.say(
            f"{out} keeps the report of an earlier bench, which has more trials; "
            f"the new trials are in {out / TRIALS}."
        )
    else:
        write(report, table(report), _picture(report, progress), out)


def _picture(report: Report, progress: Progress) -> str | None:
    """Return the report as SVG; None, with a message, where matplotlib is missing."""
    try:
        return picture(report)
    except ImportError as error:
        progress.say(f"No {PICTURE}: {error}. `pip install matplotlib` installs what it needs.")
        return None


def require_figures(rounds: Rounds, out: Path) -> None:
    """Check that at least one trial gave figures.

    Raises: Interrupted after a signal; otherwise RunFailed, with the result of the first trial.
    """
    if any(trial.result.is_ok for trial in rounds.trials):
        return
    if not rounds.trials:
        with suppress(OSError):  # it may contain the files of an earlier bench
            out.rmdir()
    if rounds.ended_by_signal is not None:
        raise interrupted(rounds.ended_by_signal)
    if not rounds.trials:
        raise RunFailed(
            f"Nothing was measured: {rounds.stopped_by} before a trial had ended.",
            fix="Run it again with more time.",
        )
    first = rounds.trials[0]
    more_time, train = "Give it more --minutes.", "Try the same recipe with `flatout train`."
    raise RunFailed(
        f"Nothing was measured: {first.point}: {first.result.reason} "
        f"All failures are in {out / TRIALS}.",
        fix=more_time if first.result.status == "timed-out" else train,
    )


def report_of(
    requested: RunConfig,
    resolved: Resolved,
    experiment: Experiment,
    rounds: Rounds,
    *,
    began: str,
    wall_s: float,
    minutes: float | None,
) -> Report:
    """Return the report: the figures, and how they were measured."""
    repeatable = repeats_to_the_bit(resolved.config)
    found = Measured(rounds.trials, rounds.stopped_by, repeatable)
    rows = experiment.rows(found)
    environments = (trial.result.environment for trial in rounds.trials if trial.result.is_ok)
    return Report(
        kind=experiment.kind,
        recipe=requested.name,
        config=requested.to_dict(),
        config_digest=requested.digest(),
        machine=resolved.machine.describe(),
        environment=next(environments, {}),
        commit=commit_of_package(),
        began=began,
        wall_s=round(wall_s, 1),
        minutes=minutes,
        repeats=rounds.begun,
        complete=rounds.is_complete,
        ended_by_signal=rounds.ended_by_signal,
        notes=notes(experiment, rounds, rows),
        rows=rows,
        total_speedup=total_speedup(experiment, found),
        trials=rounds.trials,
    )


def ladder_experiment(
    requested: RunConfig, resolved: Resolved, additions: Mapping[str, Sequence[str] | str]
) -> Experiment:
    """Return the points of the ladder; rungs with equal sets of speedups share one.

    The full set comes right after the baseline, so that even the shortest bench finds the total.
    """
    ladder = make_ladder(requested, resolved.decisions, additions)
    first: dict[frozenset[str], str] = {}
    shared = {
        rung.name: first.setdefault(frozenset(rung.speedups), rung.name) for rung in ladder.rungs
    }
    names = dict.fromkeys([BASELINE, shared[ladder.full], *shared.values()])
    points = [Point(name, with_speedups(ladder.rung(name).speedups)) for name in names]
    repeatable = repeats_to_the_bit(resolved.config)
    statistical = _pairs_with_promise("statistical", ladder, shared)
    return Experiment(
        LADDER,
        tuple(point for point in points if ladder.rung(point.name).kind != "put-in"),
        lambda found: ladder_rows(ladder, shared, found, requested, loss_steps=LOSS_STEPS),
        loss_steps=LOSS_STEPS,
        losses_each_round=frozenset(name for pair in statistical for name in pair),
        exact=() if repeatable else _pairs_with_promise("exact", ladder, shared),
        extras=tuple(point for point in points if ladder.rung(point.name).kind == "put-in"),
        total=None if ladder.full == BASELINE else (shared[ladder.full], BASELINE),
    )


def _pairs_with_promise(
    kind: str, ladder: Ladder, shared: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return the points of each rung and of the one it is compared with, for a kind of promise."""
    pairs = [(rung, ladder.rung(rung.against)) for rung in ladder.rungs if rung.against]
    return tuple(
        (shared[rung.name], shared[against.name])
        for rung, against in pairs
        if promise_between(rung.speedups, against.speedups).kind == kind
    )


def total_speedup(experiment: Experiment, found: Measured) -> Figure | None:
    """Return how many times faster the full set is than the baseline, None without figures."""
    if experiment.total is None:
        return None
    baseline = experiment.total[1]
    others = [point.name for point in experiment.points if point.name != baseline]
    noise = spread(found.ratios(name, baseline) for name in others)
    ratios = found.ratios(*experiment.total)
    return median_of(ratios, shared=noise) if ratios else None


def notes(experiment: Experiment, rounds: Rounds, rows: Sequence[Row]) -> list[str]:
    """Return notes for the reader on how the figures were measured."""
    found = []
    if not rounds.is_complete:
        found.append("The bench was interrupted; these are the trials that had ended by then.")
    counts = [row.repeats for row in rows if row.repeats]
    if counts and min(counts) < max(counts):
        found.append(
            f"Not every line has {max(counts)} repeats: the time was up, or one failed. "
            "n is the number of repeats."
        )
    if rounds.is_complete and any(row.is_unreached for row in rows):
        leave_out = ", or leave some out: speedups=auto,-NAME" if experiment.kind == LADDER else ""
        found.append(f"There was not enough time for all: add --minutes{leave_out}.")
    if any(trial.deterministic for trial in rounds.trials):
        found.append(
            "Two runs of one command differ in their last bits here, so exact promises were "
            f"checked on {DETERMINISTIC_STEPS} steps of separate, untimed runs with "
            "train.deterministic=true."
        )
    timed = [
        trial.result for trial in rounds.trials if trial.result.is_ok and not trial.deterministic
    ]
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
