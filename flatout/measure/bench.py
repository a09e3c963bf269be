"""Measure a ladder or a sweep: repeats interleaved over the points, each in a fresh process, within
the minutes there are.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, Interrupted, RunFailed
from flatout.measure import exactness
from flatout.measure.budget import Budget
from flatout.measure.experiment import Experiment, Point, with_speedups
from flatout.measure.judge import Measured, ladder_rows
from flatout.measure.ladder import BASELINE, make_ladder, promise_between
from flatout.measure.picture import picture
from flatout.measure.remember import remember
from flatout.measure.results import (
    INTERRUPTED,
    TIME_WAS_UP,
    TRIALS,
    Report,
    Row,
    Trial,
    claim,
    commit_of_package,
    is_less,
    keep,
    place_for,
    write,
)
from flatout.measure.settling import Settled, settle_apart
from flatout.measure.spec import TrialResult, TrialSpec
from flatout.measure.statistics import Figure, median_of, spread
from flatout.measure.sweep import require_sweep, sweep_experiment
from flatout.measure.table import table
from flatout.measure.trial import run_trial
from flatout.parallel.rendezvous import stated_ranks
from flatout.progress import SILENT, Progress, Task
from flatout.training.run import warn_of_busy_cores

LOSS_STEPS = 20
"""First losses that are compared."""
LADDER = "ladder"

RunTrial = Callable[[TrialSpec, float], TrialResult]


@dataclass
class Rounds:
    """What came of all rounds."""

    trials: list[Trial]
    begun: int = 0
    ended_by_signal: int | None = None
    """The signal that interrupted them; None: they went to their end."""

    @property
    def is_complete(self) -> bool:
        """Whether nobody interrupted them."""
        return self.ended_by_signal is None

    @property
    def stopped_by(self) -> str:
        """What kept a point without a trial from its turn."""
        return TIME_WAS_UP if self.is_complete else INTERRUPTED


def run_bench(
    asked: RunConfig,
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
    """Measure the ladder of a recipe, or a sweep, and write bench.json, table.md and bench.svg;
    return the report and its folder.

    Each trial is added to trials.jsonl as it ends. An interruption ends the measuring; what has
    been measured by then is judged and written. The gains are kept in `cache` too (None:
    nowhere).
    Raises: UsageError before anything was measured; RunFailed when nothing could be; Interrupted
            when nothing was by then.
    """
    began_s, began = clock(), datetime.now().astimezone()
    if stated_ranks().world_size > 1:
        raise ConfigError(
            "bench measures one process, and this one is one of several.",
            fix="Start it without torchrun.",
        )
    if sweep is not None:
        require_sweep(sweep)
    place = place_for(asked, sweep or LADDER, out)
    with progress.task("Settling the configuration"):
        settled, put_in = settle_apart(asked, cache)
    if settled.config.train.device == "cpu":
        warn_of_busy_cores(settled.machine, progress)
    experiment = (
        sweep_experiment(sweep, asked, settled)
        if sweep
        else ladder_experiment(asked, settled, put_in)
    )
    budget = Budget(
        len(experiment.points) + len(experiment.extras),
        minutes=minutes,
        repeats=repeats,
        began_s=began_s,
        clock=clock,
    )
    claim(place)
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as scratch:
        bench, start = (
            (asked.name, experiment.kind, asked.digest()),
            began.isoformat(timespec="seconds"),
        )
        rounds = measure(
            experiment,
            asked,
            budget,
            Path(scratch),
            trial,
            progress,
            keep=lambda ended: keep(ended, bench, start, place),
        )
    require_figures(rounds, place)
    report = report_of(
        asked, settled, experiment, rounds, began=start, wall_s=clock() - began_s, minutes=minutes
    )
    if is_less(report, place):
        progress.say(
            f"{place} keeps the report of an earlier bench, which has more trials; those of this one are in {place / TRIALS}."
        )
    else:
        write(report, table(report), picture(report), place)
    if cache is not None:
        remember(report, settled.machine, settled.config.train.device, cache, progress=progress)
    return report, place


def require_figures(rounds: Rounds, place: Path) -> None:
    """Do nothing when at least one trial gave figures.

    Raises: Interrupted after an interruption; else RunFailed, with what came of the first trial.
    """
    if any(trial.result.is_ok for trial in rounds.trials):
        return
    if not rounds.trials:
        with suppress(OSError):  # it holds an earlier bench
            place.rmdir()
    if rounds.ended_by_signal is not None:
        raise Interrupted(
            "Interrupted before a trial had ended with figures.",
            fix="Run it again.",
            signal_number=rounds.ended_by_signal,
        )
    if not rounds.trials:
        raise RunFailed(
            f"Nothing was measured: {rounds.stopped_by} before a trial had ended.",
            fix="Run it again, and give it longer.",
        )
    first = rounds.trials[0]
    fix = (
        "Give it more --minutes."
        if first.result.status == "timed-out"
        else "Try the same recipe with `flatout train`."
    )
    raise RunFailed(
        f"Nothing was measured: {first.point}: {first.result.reason} All that failed is in {place / TRIALS}.",
        fix=fix,
    )


def report_of(
    asked: RunConfig,
    settled: Settled,
    experiment: Experiment,
    rounds: Rounds,
    *,
    began: str,
    wall_s: float,
    minutes: float | None,
) -> Report:
    """Return the verdicts on what was measured, and how it was."""
    found = Measured(rounds.trials, rounds.stopped_by, exactness.repeats_to_the_bit(settled.config))
    rows = experiment.rows(found)
    return Report(
        kind=experiment.kind,
        recipe=asked.name,
        config=asked.to_dict(),
        config_digest=asked.digest(),
        machine=settled.machine.describe(),
        environment=next(
            (trial.result.environment for trial in rounds.trials if trial.result.is_ok), {}
        ),
        commit=commit_of_package(),
        began=began,
        wall_s=round(wall_s, 1),
        minutes=minutes,
        repeats=rounds.begun,
        complete=rounds.is_complete,
        ended_by_signal=rounds.ended_by_signal,
        notes=notes(settled, experiment, rounds, rows),
        rows=rows,
        total_speedup=total_speedup(experiment, found),
        trials=rounds.trials,
    )


def ladder_experiment(
    asked: RunConfig, settled: Settled, put_in: Mapping[str, Sequence[str] | str]
) -> Experiment:
    """Return the points of the ladder; rungs with equal sets of speedups share one.

    The full set comes right after the baseline, so that the shortest bench still finds the total.
    """
    ladder = make_ladder(asked, settled.decisions, put_in)
    first: dict[frozenset[str], str] = {}
    shared = {
        rung.name: first.setdefault(frozenset(rung.speedups), rung.name) for rung in ladder.rungs
    }
    names = dict.fromkeys([BASELINE, shared[ladder.full], *shared.values()])
    points = [Point(name, with_speedups(ladder.rung(name).speedups)) for name in names]
    pairs = [(rung, ladder.rung(rung.against)) for rung in ladder.rungs if rung.against]
    promised = {
        kind: [
            pair
            for pair in pairs
            if promise_between(pair[0].speedups, pair[1].speedups).kind == kind
        ]
        for kind in ("exact", "statistical")
    }
    exact = () if exactness.repeats_to_the_bit(settled.config) else promised["exact"]
    return Experiment(
        LADDER,
        tuple(point for point in points if ladder.rung(point.name).kind != "put-in"),
        lambda found: ladder_rows(ladder, shared, found, asked, loss_steps=LOSS_STEPS),
        loss_steps=LOSS_STEPS,
        losses_each_round=frozenset(
            shared[rung.name] for pair in promised["statistical"] for rung in pair
        ),
        exact=tuple((shared[rung.name], shared[against.name]) for rung, against in exact),
        extras=tuple(point for point in points if ladder.rung(point.name).kind == "put-in"),
        total=None if ladder.full == BASELINE else (shared[ladder.full], BASELINE),
    )


def measure(
    experiment: Experiment,
    asked: RunConfig,
    budget: Budget,
    scratch: Path,
    trial: RunTrial,
    progress: Progress,
    keep: Callable[[Trial], None],
) -> Rounds:
    """Measure every point once a round, until the rounds or the time are over, or somebody
    interrupts; `keep` gets each trial as it ends.

    Round r trains every point with the recipe's seed + r, so that the losses of a round can be
    compared. A point that fails in its first round is not tried again. Runs that settle an exact
    promise come after a round in which everything takes part.
    """
    rounds, points = (
        Rounds([]),
        {point.name: point for point in (*experiment.points, *experiment.extras)},
    )
    alive = dict(points)
    with progress.task("Measuring") as task:

        def take(name: str, number: int, deterministic: bool = False, **pace: Any) -> TrialResult:
            keys = {**points[name].values, "train.seed": asked.train.seed + number} | (
                {"train.deterministic": True} if deterministic else {}
            )
            spec = TrialSpec(
                config=asked.with_values(keys).to_dict(),
                folder=tempfile.mkdtemp(dir=scratch),
                **pace,
            )
            result = trial(spec, budget.timeout_s(name))
            done = Trial(
                point=name,
                round=number,
                seed=asked.train.seed + number,
                result=result,
                deterministic=deterministic,
            )
            rounds.trials.append(done)
            keep(done)
            return result

        try:
            for number in range(budget.repeats):
                budget.plan(number)
                due = due_in(number, experiment, rounds, alive, budget)
                if not due:
                    break
                rounds.begun = number + 1
                for place, name in enumerate(due):
                    if not budget.allows(name):
                        continue
                    left = time_left(budget.remaining_s(due[place:], budget.repeats - number - 1))
                    task.note(
                        f"round {number + 1} of {budget.repeats}, {name} ({place + 1} of {len(due)}), about {left} left"
                    )
                    is_new = name not in {done.point for done in rounds.trials}
                    loss_steps = (
                        experiment.loss_steps
                        if takes_losses(number, name, experiment, budget)
                        else 0
                    )
                    limit_s = budget.limit_s(len(due) - place + (len(alive) if number == 0 else 0))
                    result = take(
                        name,
                        number,
                        seconds=budget.seconds,
                        warmup_s=budget.warmup_s,
                        loss_steps=loss_steps,
                        limit_s=limit_s,
                    )
                    budget.record(name, result.process_s)
                    if not result.is_ok and is_new:
                        del alive[name]
                        budget.drop(name)
                if number >= budget.extras_from:
                    prove(experiment, rounds, budget, task, take)
            prove(experiment, rounds, budget, task, take)
        except KeyboardInterrupt:
            rounds.ended_by_signal = signal.SIGINT
        except Interrupted as interruption:
            rounds.ended_by_signal = interruption.exit_code - 128
    return rounds


def prove(
    experiment: Experiment,
    rounds: Rounds,
    budget: Budget,
    task: Task,
    take: Callable[..., TrialResult],
) -> None:
    """Run what an exact promise needs that its timed losses did not settle, as far as there is
    time: each point once, a few steps.
    """
    found = Measured(rounds.trials)
    open_pairs = [pair for pair in experiment.exact if exactness.differ(found.loss_pairs(*pair))]
    names = [
        name
        for name in dict.fromkeys(name for pair in open_pairs for name in pair)
        if found.deterministic(name) is None
    ]
    for place, name in enumerate(names):
        if budget.allows(name):
            task.note(f"whether exact promises hold: {name} ({place + 1} of {len(names)})")
            take(
                name,
                0,
                deterministic=True,
                seconds=0.0,
                warmup_s=0.0,
                loss_steps=exactness.STEPS,
                limit_s=budget.limit_s(len(names) - place),
            )


def takes_losses(number: int, name: str, experiment: Experiment, budget: Budget) -> bool:
    """Say whether a trial takes the losses that are compared: in the first round, and of the extras
    in theirs, with what they go on top of.
    """
    if number == 0 or name in experiment.losses_each_round:
        return True
    compared = {*(point.name for point in experiment.extras), *(experiment.total or ())[:1]}
    return number == budget.extras_from and name in compared


def due_in(
    number: int, experiment: Experiment, rounds: Rounds, alive: Collection[str], budget: Budget
) -> list[str]:
    """Return what round `number` measures, in its order: all that fits into the time, the extras
    last.

    An extra that was never tried goes before further repeats of the others, but for the full set
    that it is compared with.
    """
    points = [point.name for point in experiment.points if point.name in alive]
    extras = [
        point.name
        for point in experiment.extras
        if point.name in alive and number >= budget.extras_from
    ]
    if number:
        untried = [name for name in extras if name not in {trial.point for trial in rounds.trials}]
        full = [name for name in (experiment.total or ())[:1] if name in alive]
        first = [*full, *untried] if untried else []
        fitting = set(budget.fits(list(dict.fromkeys([*first, *points, *extras]))))
        if experiment.total and len(fitting) < 2:
            return []  # gains need two points of one round
        points, extras = (
            [name for name in points if name in fitting],
            [name for name in extras if name in fitting],
        )
    return [*in_turn(points, number), *extras]


def time_left(seconds: float) -> str:
    """Return a rough time: seconds below 90, then minutes."""
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Return the order of round `number`: neighbours stay neighbours, so that what is compared is
    measured close together.

    Every round begins at another point, and every other one goes backwards, so that a machine that
    slows down over the minutes, or within a round, favours none of them.
    """
    if not names:
        return []
    start = number * len(names) * 2 // 5 % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if number % 2 else order


def total_speedup(experiment: Experiment, found: Measured) -> Figure | None:
    """Return how many times faster the full set is than the baseline; None when one of them gave no
    figures.
    """
    if experiment.total is None:
        return None
    ratios = found.ratios(*experiment.total)
    noise = spread(
        found.ratios(point.name, experiment.total[1])
        for point in experiment.points
        if point.name != experiment.total[1]
    )
    return median_of(ratios, shared=noise) if ratios else None


def notes(
    settled: Settled, experiment: Experiment, rounds: Rounds, rows: Sequence[Row]
) -> list[str]:
    """Return what a reader of the figures has to know about how they were made."""
    said = []
    if not rounds.is_complete:
        said.append("It was interrupted: these are the trials that had ended by then.")
    counts = [row.repeats for row in rows if row.repeats]
    if counts and min(counts) < max(counts):
        said.append(
            f"Not every line has {max(counts)} repeats: the time was up, or one failed. n says how many it has."
        )
    if rounds.is_complete and any(row.is_unreached for row in rows):
        leave_out = ", or leave some out: speedups=auto,-NAME" if experiment.kind == LADDER else ""
        said.append(f"The time did not suffice for all: give it more --minutes{leave_out}.")
    if any(trial.deterministic for trial in rounds.trials):
        said.append(
            f"Two runs of one command differ here in their last bits: exact promises were judged by {exactness.STEPS} steps of runs of their own, "
            "with train.deterministic=true, which were not timed."
        )
    measured = [
        trial.result for trial in rounds.trials if trial.result.is_ok and not trial.deterministic
    ]
    if measured:
        steps = statistics.median(result.measured_steps or 0 for result in measured)
        before = statistics.median(result.warmup_steps or 0 for result in measured)
        said.append(
            f"Steps measured in a trial, the median: {steps:.0f}, after {before:.0f} of warming up."
        )
        moving = sum(result.settled is False for result in measured)
        if moving:
            said.append(
                f"In {moving} of {len(measured)} trials the step time had not settled when the warming up had to end."
            )
    return said
