"""An experiment: points, each a configuration to measure, round by round, as time allows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, Interrupted, signal_of
from flatout.measure.trials.budget import Budget
from flatout.measure.trials.promises import DETERMINISTIC_STEPS, Measured, differ
from flatout.measure.trials.results import INTERRUPTED, TIME_WAS_UP, Row, Trial
from flatout.measure.trials.spec import TrialResult, TrialSpec
from flatout.parallel.rendezvous import stated_ranks
from flatout.progress import Progress

RunTrial = Callable[[TrialSpec, float], TrialResult]


@dataclass(frozen=True)
class Point:
    """One configuration to measure."""

    name: str
    values: Mapping[str, Any]
    """Keys that override the requested configuration."""


@dataclass(frozen=True)
class Experiment:
    """All points, the most important first: when time is short, the last ones are dropped."""

    kind: str
    """ladder, or the setting that is swept."""
    points: tuple[Point, ...]
    """Measured in every round."""
    rows: Callable[[Measured], list[Row]]
    """Makes the table from the trials."""
    loss_steps: int = 0
    """Number of first losses to compare."""
    losses_each_round: frozenset[str] = frozenset()
    """Points that record losses in every round, because a statistical promise needs seeds."""
    exact: tuple[tuple[str, str], ...] = ()
    """Pairs of points that promise equal losses, if runs differ in their last bits here."""
    extras: tuple[Point, ...] = ()
    """Measured last in a round; with a time limit, only after the others have repeats."""
    total: tuple[str, str] | None = None
    """The full set and the baseline, whose ratio is the total speedup."""


def with_speedups(names: Iterable[str]) -> dict[str, Any]:
    """Return the configuration keys that switch on exactly these speedups, precisions included."""
    return {"speedups": list(names) or "none", "train.precision": "auto"}


@dataclass
class Rounds:
    """The trials of all rounds."""

    trials: list[Trial]
    begun: int = 0
    ended_by_signal: int | None = None
    """The signal that interrupted the rounds, if any."""

    @property
    def is_complete(self) -> bool:
        """Whether no signal interrupted the rounds."""
        return self.ended_by_signal is None

    @property
    def stopped_by(self) -> str:
        """Why a point may have no trial."""
        return TIME_WAS_UP if self.is_complete else INTERRUPTED

    @property
    def points(self) -> set[str]:
        """Names of the points that have a trial."""
        return {trial.point for trial in self.trials}


@dataclass
class Measurement:
    """Measures an experiment.

    Round r trains every point with the recipe's seed + r, so that losses of one round can be
    compared. A point that fails in its first round is not tried again. The deterministic runs that
    decide exact promises follow a round in which every point takes part.
    """

    experiment: Experiment
    config: RunConfig
    budget: Budget
    trial: RunTrial
    keep: Callable[[Trial], None]
    """Receives each trial when it ends."""
    progress: Progress
    rounds: Rounds = field(default_factory=lambda: Rounds([]))

    def __post_init__(self) -> None:
        points = (*self.experiment.points, *self.experiment.extras)
        self._points = {point.name: point for point in points}
        self._alive = dict(self._points)

    def run(self) -> Rounds:
        """Measure all rounds, or until a signal interrupts, and return the trials."""
        try:
            with (
                tempfile.TemporaryDirectory(prefix="flatout-bench-") as self._scratch,
                self.progress.task("Measuring") as self._task,
            ):
                for number in range(self.budget.repeats):
                    if not self._run_round(number):
                        break
                self._run_deterministic()
        except (KeyboardInterrupt, Interrupted) as interruption:
            self.rounds.ended_by_signal = signal_of(interruption)
        return self.rounds

    def _run_round(self, number: int) -> bool:
        """Measure one round; return False when there was nothing to measure in it."""
        budget = self.budget
        budget.plan(number)
        due = due_in(number, self.experiment, self.rounds, self._alive, budget)
        if not due:
            return False
        self.rounds.begun = number + 1
        for index, name in enumerate(due):
            if not budget.allows(name):
                continue
            left = time_left(budget.remaining_s(due[index:], budget.repeats - number - 1))
            self._task.note(
                f"round {number + 1} of {budget.repeats}, {name} ({index + 1} of {len(due)}), "
                f"about {left} left"
            )
            is_new = name not in self.rounds.points
            takes_losses = _takes_losses(number, name, self.experiment, budget)
            result = self._run_trial(
                name,
                number,
                seconds=budget.seconds,
                warmup_s=budget.warmup_s,
                loss_steps=self.experiment.loss_steps if takes_losses else 0,
                limit_s=budget.limit_s(len(due) - index + (len(self._alive) if not number else 0)),
            )
            budget.record(name, result.process_s)
            if not result.is_ok and is_new:
                del self._alive[name]
                budget.drop(name)
        if number >= budget.extras_from:
            self._run_deterministic()
        return True

    def _run_deterministic(self) -> None:
        """Run the points whose exact promises the timed losses did not confirm.

        Each point runs once, for a few steps, if there is time.
        """
        found = Measured(self.rounds.trials)
        pairs = [pair for pair in self.experiment.exact if differ(found.loss_pairs(*pair))]
        names = [
            name
            for name in dict.fromkeys(name for pair in pairs for name in pair)
            if found.deterministic(name) is None
        ]
        for index, name in enumerate(names):
            if self.budget.allows(name):
                self._task.note(f"checking exact promises: {name} ({index + 1} of {len(names)})")
                self._run_trial(
                    name,
                    0,
                    deterministic=True,
                    seconds=0.0,
                    warmup_s=0.0,
                    loss_steps=DETERMINISTIC_STEPS,
                    limit_s=self.budget.limit_s(len(names) - index),
                )

    def _run_trial(self, name: str, number: int, **limits: Any) -> TrialResult:
        limits |= {"timeout_s": self.budget.timeout_s(name), "scratch": self._scratch}
        done = run_point(self._points[name], self.config, number, self.trial, **limits)
        self.rounds.trials.append(done)
        self.keep(done)
        return done.result


def run_point(
    point: Point,
    config: RunConfig,
    number: int,
    run_trial: RunTrial,
    *,
    timeout_s: float,
    scratch: str,
    deterministic: bool = False,
    **limits: Any,
) -> Trial:
    """Run a trial of a point in round `number`, with the seed of that round, and return it.

    `limits` are the other fields of its specification.
    """
    seed = config.train.seed + number
    keys = {**point.values, "train.seed": seed}
    if deterministic:
        keys["train.deterministic"] = True
    folder = tempfile.mkdtemp(dir=scratch)
    spec = TrialSpec(config=config.with_values(keys).to_dict(), folder=folder, **limits)
    return Trial(
        point=point.name,
        round=number,
        seed=seed,
        result=run_trial(spec, timeout_s),
        deterministic=deterministic,
    )


def _takes_losses(number: int, name: str, experiment: Experiment, budget: Budget) -> bool:
    """Return whether a trial records the losses to compare.

    All trials do in the first round; in the first round of the extras, these and the full set that
    they are compared with do.
    """
    if number == 0 or name in experiment.losses_each_round:
        return True
    compared = {*(point.name for point in experiment.extras), *(experiment.total or ())[:1]}
    return number == budget.extras_from and name in compared


def due_in(
    number: int, experiment: Experiment, rounds: Rounds, alive: Collection[str], budget: Budget
) -> list[str]:
    """Return the points to measure in round `number`, in order: all that fit, extras last.

    An extra that was never tried has priority over further repeats of the others, except for the
    full set that it is compared with.
    """
    points = [point.name for point in experiment.points if point.name in alive]
    extras = [
        point.name
        for point in experiment.extras
        if point.name in alive and number >= budget.extras_from
    ]
    if number:
        untried = [name for name in extras if name not in rounds.points]
        full = [name for name in (experiment.total or ())[:1] if name in alive]
        first = [*full, *untried] if untried else []
        fitting = set(budget.fits(list(dict.fromkeys([*first, *points, *extras]))))
        if experiment.total and len(fitting) < 2:
            return []  # a gain needs two points of one round
        points = [name for name in points if name in fitting]
        extras = [name for name in extras if name in fitting]
    return [*in_turn(points, number), *extras]


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Return the order of round `number`; neighbours stay neighbours, to be measured close in time.

    Every round starts at another point, and every other round runs backwards, so that a machine
    that slows down over minutes favours none of them.
    """
    if not names:
        return []
    start = number * len(names) * 2 // 5 % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if number % 2 else order


def require_one_process(command: str) -> None:
    """Check that this process is not one of several.

    Raises: ConfigError.
    """
    if stated_ranks().world_size > 1:
        raise ConfigError(
            f"{command} measures a single process, and this is one of several.",
            fix="Start it without torchrun.",
        )


def interrupted(signal_number: int) -> Interrupted:
    """Return the error for a signal that came before any figures."""
    return Interrupted(
        "Interrupted before any trial had given figures.",
        fix="Run it again.",
        signal_number=signal_number,
    )


def time_left(seconds: float) -> str:
    """Return a rough time: seconds below 90, then minutes."""
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
