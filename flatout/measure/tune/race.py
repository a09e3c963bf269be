"""Trials of settings, and how much faster one setting is than another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.assembly.recipe import Promise
from flatout.config.schema import RunConfig
from flatout.measure.trials.budget import SAFETY, Budget
from flatout.measure.trials.ladder import promise_between
from flatout.measure.trials.promises import (
    DETERMINISTIC_STEPS,
    LossCheck,
    Measured,
    check_losses,
    repeats_to_the_bit,
)
from flatout.measure.trials.resolving import Resolved
from flatout.measure.trials.results import Trial
from flatout.measure.trials.rounds import Point, RunTrial, run_point, time_left
from flatout.measure.trials.spec import Rehearsal, TrialResult
from flatout.measure.trials.statistics import Figure, Spread, median_of, spread, student
from flatout.measure.trials.sweep import filling
from flatout.measure.tune.space import Setting

LOSS_STEPS = 20
"""Number of first losses that are compared."""
EXPECTED_DEVIATION, EXPECTED_FREEDOM = 0.02, 4
"""Relative noise of a ratio of two rates that is assumed before anything was repeated, and the
number of repeats that the assumption counts for: a single measurement then decides a difference
of 6%, and smaller ones are repeated.
"""
START = "auto"
"""Name of the setting that `auto` chose."""


@dataclass
class Race:
    """Runs trials of settings, and compares them.

    A trial of round r trains with the recipe's seed + r. Settings are compared within rounds.
    """

    requested: RunConfig
    resolved: Resolved
    start: Setting
    budget: Budget
    trial: RunTrial
    scratch: str
    note: Callable[[str], None]
    """Shows what is measured."""
    is_over: bool = False
    """Whether an interruption ended it, so that no further trial starts."""
    base: Setting = field(init=False)
    """The first setting that gave figures; the noise is that of ratios to it."""
    trials: list[Trial] = field(default_factory=list)
    results: dict[Setting, TrialResult] = field(default_factory=dict)
    """The last result of each setting."""

    def __post_init__(self) -> None:
        self.base = self.start

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, the same in every trial."""
        return self.resolved.config.batch.tokens_per_step or 0

    def name(self, setting: Setting) -> str:
        """Return the setting's name: how it differs from what `auto` chose."""
        start = self.start
        parts = [
            *([f"rows {setting.rows}"] if setting.rows != start.rows else []),
            *([f"prefetch {setting.prefetch}"] if setting.prefetch != start.prefetch else []),
            *(f"+ {name}" for name in sorted(setting.speedups - start.speedups)),
            *(f"- {name}" for name in sorted(start.speedups - setting.speedups)),
        ]
        return ", ".join(parts) or START

    def allows(self, *settings: Setting, reserve_s: float | None = None) -> bool:
        """Return whether there is time for a trial of each setting, and `reserve_s` after them.

        Without it, the time of the slowest setting is reserved, so that any of them can be
        rehearsed at the end.
        """
        slowest_s = self.slowest_s if reserve_s is None else reserve_s
        return self.budget.allows(*map(self.name, settings), reserve_s=slowest_s)

    @property
    def slowest_s(self) -> float:
        """Seconds that a trial of the slowest setting takes at most; 0 before the first."""
        names = map(self.name, filter(self.is_ok, self.results))
        return SAFETY * max(map(self.budget.expected_s, names), default=0.0)

    def measure(
        self,
        setting: Setting,
        number: int,
        *,
        losses: bool = False,
        rehearse: Sequence[Rehearsal] = (),
        trials_left: int = 2,
    ) -> TrialResult:
        """Measure a setting in round `number`, and return the result."""
        left = time_left(min(self.budget.left_s, 1e6))
        limit = f", at most {left} left" if math.isfinite(self.budget.left_s) else ""
        self.note(f"{self.name(setting)}{limit}")
        return self._run(
            setting,
            number,
            seconds=self.budget.seconds,
            warmup_s=self.budget.warmup_s,
            loss_steps=LOSS_STEPS if losses else 0,
            limit_s=self.budget.limit_s(trials_left),
            rehearse=list(rehearse),
        )

    def _run(
        self, setting: Setting, number: int, *, deterministic: bool = False, **limits: Any
    ) -> TrialResult:
        point = Point(self.name(setting), setting.values(self.tokens_per_step))
        limits |= {"timeout_s": self.budget.timeout_s(point.name), "scratch": self.scratch}
        limits["deterministic"] = deterministic
        trial = run_point(point, self.requested, number, self.trial, **limits)
        if not deterministic:
            self.budget.record(point.name, trial.result.process_s)
            self.results[setting] = trial.result
        self.trials.append(trial)
        return trial.result

    def is_ok(self, setting: Setting) -> bool:
        """Return whether the setting was measured, and its last trial gave figures."""
        return setting in self.results and self.results[setting].is_ok

    @property
    def measured(self) -> Measured:
        """The trials by setting."""
        repeatable = repeats_to_the_bit(self.resolved.config)
        return Measured(self.trials, repeats_to_the_bit=repeatable)

    @property
    def over_the_run(self) -> Measured:
        """The trials, with rates that include the time that the whole run spends compiling."""
        tokens = (self.resolved.config.train.steps or 1) * self.tokens_per_step
        trials = [
            trial.model_copy(update={"result": _with_compilation(trial.result, tokens)})
            for trial in self.trials
        ]
        return Measured(trials)

    def interval(self, one: Setting, other: Setting) -> tuple[float, float, float] | None:
        """Return how many times faster `one` finishes the run than `other`: low, median, high.

        The interval is for deciding what to repeat: its noise is an assumption that repeats
        replace. None when no round has both.
        """
        found, names = self.over_the_run, (self.name(one), self.name(other))
        ratios = found.ratios(*names)
        if not ratios:
            return None
        noise, base = self._noise(found), found.rates(self.name(self.base))
        rates = spread([base])
        freedom = EXPECTED_FREEDOM + noise.freedom + rates.freedom
        squares = (
            EXPECTED_FREEDOM * EXPECTED_DEVIATION**2
            + noise.freedom * noise.deviation**2
            + rates.freedom * 2 * rates.deviation**2  # a ratio has the noise of two rates
        )
        half = student(freedom) * math.sqrt(squares / freedom / len(ratios))
        median = statistics.median(map(math.log, ratios))
        return math.exp(median - half), math.exp(median), math.exp(median + half)

    def gain(self, one: Setting, other: Setting) -> Figure | None:
        """Return how many times more tokens per second `one` trains than `other`.

        None when no round has both.
        """
        found = self.measured
        ratios = found.ratios(self.name(one), self.name(other))
        return median_of(ratios, shared=self._noise(found)) if ratios else None

    def _noise(self, found: Measured) -> Spread:
        base = self.name(self.base)
        points = dict.fromkeys(trial.point for trial in self.trials if trial.point != base)
        return spread(found.ratios(point, base) for point in points)

    def rate(self, setting: Setting) -> Figure | None:
        """Return the setting's tokens per second, None without figures."""
        found = self.measured
        rates = found.rates(self.name(setting))
        noise = spread(
            found.rates(point) for point in dict.fromkeys(trial.point for trial in self.trials)
        )
        return median_of(rates, shared=noise) if rates else None

    def repeats(self, setting: Setting) -> int:
        """Return the number of timed trials of the setting that gave figures."""
        return len(self.measured.ok(self.name(setting)))

    def has_losses(self, one: Setting, other: Setting) -> bool:
        """Return whether both settings have losses of one round."""
        return bool(self.measured.loss_pairs(self.name(one), self.name(other)))

    def parity(self, one: Setting, other: Setting) -> LossCheck:
        """Return whether the losses of `one` and `other` differ by no more than promised."""
        promise, names = promise_of(one, other), (self.name(one), self.name(other))
        if self.measured.needs_deterministic(promise, *names):
            for setting in (one, other):
                self._run_deterministic(setting)
        return check_losses(promise, *names, self.measured, self.requested, loss_steps=LOSS_STEPS)

    def _run_deterministic(self, setting: Setting) -> None:
        """Run a setting once with train.deterministic=true, untimed, if there is time."""
        known = self.measured.deterministic(self.name(setting))
        if known is None and not self.is_over and self.allows(setting):
            self.note(f"checking the losses of {self.name(setting)}")
            limits = {"seconds": 0.0, "warmup_s": 0.0, "loss_steps": DETERMINISTIC_STEPS}
            limit_s = self.budget.limit_s(2)
            self._run(setting, 0, deterministic=True, limit_s=limit_s, **limits)


def promise_of(one: Setting, other: Setting) -> Promise:
    """Return the promise about the losses of two settings.

    Other rows per micro-batch add the promise of the speedup that chooses them.
    """
    rows = set(filling("micro_batch")) if one.rows != other.rows else set()
    return promise_between(one.speedups | rows, other.speedups)


def _with_compilation(result: TrialResult, tokens: int) -> TrialResult:
    """Return the result with the rate of a run of `tokens`, its compilation included."""
    if not result.tokens_per_s or not result.compile_s:
        return result
    seconds = tokens / result.tokens_per_s + result.compile_s
    return result.model_copy(update={"tokens_per_s": tokens / seconds})
