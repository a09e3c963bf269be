"""Runs the trials of points in rounds, within a time limit, and keeps them.

A round measures every point once, in a changing order. Only what was measured in one round is
compared: the load of a machine changes over minutes.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flatout.assembly.recipe import Tolerance
from flatout.config.schema import RunConfig
from flatout.distributed.rendezvous import stated_ranks
from flatout.errors import ConfigError, Interrupted, signal_of
from flatout.measure.experiments.losses import DETERMINISTIC_STEPS, LOSS_STEPS, Trials
from flatout.measure.experiments.records import (
    INTERRUPTED,
    Rehearsal,
    Row,
    Trial,
    TrialResult,
    TrialSpec,
)
from flatout.progress import Progress

RunTrial = Callable[[TrialSpec, float], TrialResult]
"""Runs a trial, at most for these seconds."""

REPEATS = 5
DEFAULT_SECONDS, MIN_SECONDS, MAX_SECONDS = 5.0, 1.0, 15.0
"""Seconds of measured steps per trial: without a time limit, minimum, maximum."""
START_S = 4.0
"""Approximate time that a process takes before it trains."""
USUAL_OVERHEAD_S = START_S + 3.0
"""Assumed overhead of a trial until one has run: its start, and a short warm-up."""
WARMUP_SHARE, MIN_WARMUP_S, MAX_WARMUP_S = 3.0, 6.0, 20.0
"""Limit of a trial's warm-up: a multiple of its measured time, and its bounds."""
LONGEST_TRIAL_S = 900.0
SAFETY = 1.15
"""A trial is started if this multiple of its previous time still fits."""
SLACK = 1.1
"""Rounds are planned with this factor of spare time."""
CLOSING_S = 1.5
"""Reserved for evaluating and writing the results."""
SHARE = 2.0
"""A trial may train for this multiple of its fair share of the time. Most take less."""
MIN_LIMIT_S = 3.0


class Budget:
    """Divides minutes over rounds of trials. Without minutes, `repeats` rounds of five seconds.

    With minutes, there are at least two rounds if possible and at most `repeats`. The seconds of a
    trial shrink until they fit, and its overhead is estimated from earlier trials. Points that do
    not fit into a round are dropped from it, starting with the last.
    """

    def __init__(
        self,
        num_points: int,
        *,
        minutes: float | None,
        repeats: int | None,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.repeats = repeats or REPEATS
        """Maximum number of rounds."""
        self._clock = clock
        self._num_points = num_points
        self._total_s = math.inf if minutes is None else 60 * minutes
        self._began_s = clock() if began_s is None else began_s
        self._overheads: dict[str, float] = {}
        self.seconds = DEFAULT_SECONDS
        """Seconds of measured steps per trial of this round."""
        self.plan(rounds_done=0)

    @property
    def late_from(self) -> int:
        """The first round of late points: with a time limit, after two rounds of all others."""
        return 0 if math.isinf(self._total_s) else min(2, self.repeats - 1)

    @property
    def warmup_s(self) -> float:
        """Latest end of the warm-up of a trial of this round."""
        return min(max(WARMUP_SHARE * self.seconds, MIN_WARMUP_S), MAX_WARMUP_S)

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self._total_s - CLOSING_S - (self._clock() - self._began_s)

    def plan(self, rounds_done: int) -> None:
        """Choose the seconds of the next round's trials.

        They allow as many rounds as possible with enough time per trial, but at least two in total.
        """
        if math.isinf(self._total_s) or not self._num_points:  # every point may have failed
            return
        overhead_s = (
            sum(self._overheads.values())
            + (self._num_points - len(self._overheads)) * self._usual_overhead()
        )
        wanted = self.repeats - rounds_done
        minimum = max(1, min(2 - rounds_done, wanted))
        for rounds in range(max(wanted, 1), 0, -1):
            seconds = (self.left_s / (SLACK * rounds) - overhead_s) / self._num_points
            if seconds >= 2 * MIN_SECONDS or rounds <= minimum:
                break
        self.seconds = max(
            MIN_SECONDS, min(seconds, MAX_SECONDS if rounds == wanted else DEFAULT_SECONDS)
        )

    def fits(self, names: Sequence[str]) -> list[str]:
        """Return the names that fit into a round that starts now, in order of priority."""
        left_s, fitting = self.left_s, []
        for name in names:
            cost_s = self.expected_s(name)
            if cost_s <= left_s:
                left_s -= cost_s
                fitting.append(name)
        return fitting

    def allows(self, *names: str, reserve_s: float = 0.0) -> bool:
        """Return whether there is time for a trial of each name, and `reserve_s` after them."""
        return SAFETY * sum(map(self.expected_s, names)) + reserve_s <= self.left_s

    def expected_s(self, name: str) -> float:
        """Return the expected time of a trial of `name`, from earlier trials."""
        return self._overheads.get(name, self._usual_overhead()) + self.seconds

    def timeout_s(self, name: str) -> float:
        """Return the seconds after which a trial is killed, at most the time left.

        It may take a quarter of the total, or more if it is expected to be slow, and half of it
        before anything has been measured.
        """
        if math.isinf(self._total_s):
            return LONGEST_TRIAL_S
        share = 1 / 4 if self._overheads else 1 / 2
        limit_s = max(share * self._total_s, 3 * self.expected_s(name))
        return max(min(limit_s, self.left_s), 1.0)

    def limit_s(self, trials_left: int) -> float:
        """Return the seconds by which a trial must end its steps, with `trials_left` to come."""
        if math.isinf(self._total_s):
            return LONGEST_TRIAL_S / 3
        return max(min(SHARE / max(trials_left, 1), 1.0) * self.left_s - START_S, MIN_LIMIT_S)

    def remaining_s(self, names: Sequence[str], rounds_after: int) -> float:
        """Return the time left: for `names` and `rounds_after` more rounds, or until the limit."""
        return min(sum(map(self.expected_s, names)) * (1 + rounds_after), self.left_s)

    def record(self, name: str, trial_s: float) -> None:
        """Record the overhead of a trial that took `trial_s` in total."""
        self._overheads[name] = max(trial_s - self.seconds, 0.0)

    def drop(self, name: str) -> None:
        """Plan without `name` from now on."""
        self._overheads.pop(name, None)
        self._num_points -= 1

    def _usual_overhead(self) -> float:
        return statistics.median(self._overheads.values()) if self._overheads else USUAL_OVERHEAD_S


@dataclass(frozen=True)
class Point:
    """One configuration to measure."""

    name: str
    values: Mapping[str, Any]
    """Keys that override the requested configuration."""
    is_late: bool = False
    """Whether it comes last in a round, and with a time limit only after the others have repeats:
    a speedup that is off may be slow, or compile for minutes."""


@dataclass(frozen=True)
class Experiment:
    """All points, the most important first: when time is short, the last ones are dropped."""

    kind: str
    """ablation, or the setting that is swept."""
    points: tuple[Point, ...]
    rows: Callable[[Trials], list[Row]]
    """Makes the table from the trials."""
    pairs: tuple[tuple[str, str, str], ...] = ()
    """Points whose losses are compared, with the kind of tolerance."""
    total: tuple[str, str] | None = None
    """The full set and the baseline, whose ratio is the total speedup."""


def with_speedups(names: Iterable[str]) -> dict[str, Any]:
    """Return the configuration keys that switch on exactly these speedups, precisions included."""
    return {"speedups": list(names) or "none", "train.precision": "auto"}


@dataclass
class Schedule:
    """Runs trials of points, one after the other, and keeps them.

    A trial of round r trains with the recipe's seed + r, so that losses of one round can be
    compared. A signal ends the schedule, and keeps its trials.
    """

    requested: RunConfig
    trials: Trials
    budget: Budget
    run_trial: RunTrial
    keep: Callable[[Trial], object] = lambda trial: None
    """Receives each trial when it ends."""
    note: Callable[[str], object] = lambda text: None
    """Shows what is measured."""
    scratch: str | None = None
    """Where the trials write. The system's directory for temporary files until `running`."""
    ended_by_signal: int | None = None
    """The signal that interrupted it, if any. No further trial starts."""
    _failed: set[str] = field(default_factory=set)
    """Points that failed in their first round of an experiment."""

    @contextmanager
    def running(self, progress: Progress, title: str) -> Iterator[None]:
        """Show the trials inside the block as an operation, which a signal ends early."""
        try:
            with (
                tempfile.TemporaryDirectory(prefix="flatout-trials-") as self.scratch,
                progress.task(title) as task,
            ):
                self.note = task.note
                yield
        except (KeyboardInterrupt, Interrupted) as interruption:
            self.ended_by_signal, self.trials.stopped_by = signal_of(interruption), INTERRUPTED

    def require_uninterrupted(self) -> None:
        """Check that no signal came before there were results.

        Raises: Interrupted.
        """
        if self.ended_by_signal is not None:
            raise Interrupted(
                "Interrupted before any trial had a result.",
                fix="Run it again.",
                signal_number=self.ended_by_signal,
            )

    def measure(
        self,
        point: Point,
        number: int,
        *,
        loss_steps: int = 0,
        rehearse: Sequence[Rehearsal] = (),
        trials_left: int = 2,
        deterministic: bool = False,
    ) -> TrialResult:
        """Measure a point in round `number`, and return the result.

        A deterministic trial is for its losses alone, and takes no time for others.
        """
        budget, seed = self.budget, self.requested.train.seed + number
        keys = {**point.values, "train.seed": seed}
        if deterministic:
            keys["train.deterministic"] = True
        spec = TrialSpec(
            config=self.requested.with_values(keys).to_dict(),
            folder=tempfile.mkdtemp(dir=self.scratch),
            seconds=0.0 if deterministic else budget.seconds,
            warmup_s=0.0 if deterministic else budget.warmup_s,
            loss_steps=loss_steps,
            limit_s=budget.limit_s(trials_left),
            rehearse=list(rehearse),
        )
        trial = Trial(
            point=point.name,
            round=number,
            seed=seed,
            result=self.run_trial(spec, budget.timeout_s(point.name)),
            deterministic=deterministic,
        )
        self.trials.done.append(trial)
        self.keep(trial)
        if not deterministic:
            budget.record(point.name, trial.result.process_s)
        return trial.result

    def decide_exact(self, one: Point, other: Point, *, reserve_s: float = 0.0) -> None:
        """Run two points with train.deterministic=true, if only that decides an exact tolerance.

        A point runs once, for a few untimed steps, if there is time.
        """
        if self.trials.needs_deterministic(Tolerance.exact(), one.name, other.name):
            for point in (one, other):
                has_run = self.trials.deterministic(point.name) is not None
                if not has_run and self.budget.allows(point.name, reserve_s=reserve_s):
                    self.note(f"checking the losses of {point.name}")
                    self.measure(point, 0, loss_steps=DETERMINISTIC_STEPS, deterministic=True)

    def run(self, experiment: Experiment) -> None:
        """Measure an experiment in rounds, as many as the budget has time for.

        A point that fails in its first round is not tried again. Its losses are recorded in its
        first round, and in each round for a statistical tolerance, which needs seeds. The
        deterministic runs that decide exact tolerances follow a round in which every point takes
        part.
        """
        budget, known = self.budget, {point.name: point for point in experiment.points}
        seeds = {name for *pair, kind in experiment.pairs if kind == "statistical" for name in pair}
        for number in range(budget.repeats):
            budget.plan(number)
            due = self.due(number, experiment)
            new = {point.name for point in due if not self.trials.timed(point.name)}
            with_losses = new | seeds
            if new and experiment.total:
                with_losses.add(experiment.total[0])
            for index, point in enumerate(due):
                name, left = point.name, [each.name for each in due[index:]]
                if not budget.allows(name):
                    continue
                left_s = budget.remaining_s(left, budget.repeats - number - 1)
                self.note(
                    f"round {number + 1} of {budget.repeats}, {name} ({index + 1} of {len(due)}), "
                    f"about {time_left(left_s)} left"
                )
                result = self.measure(
                    point,
                    number,
                    loss_steps=LOSS_STEPS if experiment.pairs and name in with_losses else 0,
                    trials_left=len(left) + (0 if number else len(known) - len(self._failed)),
                )
                if not result.is_ok and name in new:
                    self._failed.add(name)
                    budget.drop(name)
            if number >= budget.late_from or not due:
                for one, other, kind in experiment.pairs:
                    if kind == "exact":
                        self.decide_exact(known[one], known[other])
            if not due:
                break

    def due(self, number: int, experiment: Experiment) -> list[Point]:
        """Return the points to measure in round `number`, in order: all that fit, late ones last.

        One that was never tried has priority over further repeats of the others, except for the
        full set that it is compared with.
        """
        points = [
            point
            for point in in_turn(experiment.points, number)
            if point.name not in self._failed
            and (number >= self.budget.late_from or not point.is_late)
        ]
        if number:
            ranked = [point.name for point in experiment.points if point in points]
            full = (experiment.total or ())[:1]
            ranked.sort(key=lambda name: (name not in full, bool(self.trials.timed(name))))
            fitting = self.budget.fits(ranked)
            if experiment.total and len(fitting) < 2:
                return []  # a gain needs two points of one round
            points = [point for point in points if point.name in fitting]
        return sorted(points, key=lambda point: point.is_late)


def in_turn(points: Sequence[Point], number: int) -> list[Point]:
    """Return the order of round `number`. Neighbours stay neighbours, to be measured close in time.

    Every round starts at a different point, and every other round runs backwards, so that a machine
    that slows down over minutes favours none of them.
    """
    if not points:
        return []
    start = number * len(points) * 2 // 5 % len(points)
    order = [*points[start:], *points[:start]]
    return order[::-1] if number % 2 else order


def require_one_process(command: str) -> None:
    """Check that this process is not one of several.

    Raises: ConfigError.
    """
    if stated_ranks().world_size > 1:
        raise ConfigError(
            f"{command} measures a single process, but this is one of several.",
            fix="Start it without torchrun.",
        )


def time_left(seconds: float) -> str:
    """Return a rough time: seconds below 90, then minutes."""
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
