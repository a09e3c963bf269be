"""Detection of a steady step time, and the length of a trial, on an imaginary clock."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from flatout.measure.experiments.records import TrialSpec
from flatout.measure.experiments.trial import Pace
from flatout.measure.steps.steady import WINDOW_STEPS, is_steady
from flatout.training.metrics.clocks import TimeBreakdown


def warmup_steps_of(series):
    """The number of steps of the warm-up."""
    return next((count for count in range(1, len(series) + 1) if is_steady(series[:count])), None)


def test_a_steady_series_ends_the_warm_up():
    two = 2 * WINDOW_STEPS
    assert warmup_steps_of([0.25] * 40) == 1 + two, "slow steps: eight each"
    assert warmup_steps_of([0.125] * 40) == 1 + two
    assert warmup_steps_of([2**-6] * 400) == 1 + 2 * 64, "quick steps: a second each"
    assert warmup_steps_of([30.0] + [0.25] * 40) == 1 + two
    assert warmup_steps_of([0.5, 30.0] + [0.25] * 40) <= 2 + two, "one does not move a median"
    assert warmup_steps_of([0.25 * 1.02**step for step in range(60)]) is None, "it gets slower"
    # Ten steps at 31, ten at 38.7, then 41: only the last level is measured.
    assert warmup_steps_of([1 / 3.1] * 10 + [1 / 3.87] * 10 + [1 / 4.1] * 40) > 20
    falling = [0.01 * (1 + 0.997**step) for step in range(3000)]
    assert falling[warmup_steps_of(falling)] / 0.01 < 1.1


def test_noise_alone_does_not_prolong_the_warm_up_much():
    for seed in range(5):
        draw = random.Random(seed)
        assert warmup_steps_of([0.1 * draw.lognormvariate(0, 0.05) for _ in range(200)]) < 100


class MadeUp:
    """A log, a data loader and a clock, for steps of given durations."""

    last_result = None

    def __init__(self, step_s):
        self.now, self.step_s, self.spent_s, self.primed = 0.0, iter(step_s), 0.0, []
        self.run = SimpleNamespace(
            step=0, last_step=10**6, loader=SimpleNamespace(prime=self.primed.append)
        )

    def time_breakdown(self):
        return TimeBreakdown(steps=self.run.step, train_s=self.spent_s)

    def train(self, **limits):
        usual = {"seconds": 2.0, "loss_steps": 0, "warmup_s": 1e9, "limit_s": 1e9}
        spec = TrialSpec(config={}, folder="", **usual | limits)
        pace = Pace(self, spec, clock=lambda: self.now)
        while not pace.requested(self.run):
            took = next(self.step_s)
            self.now += took
            self.spent_s += took
            self.run.step += 1
        pace.measured = self.time_breakdown() - pace.before
        return pace


def test_a_trial_warms_up_and_measures_for_its_seconds():
    made_up = MadeUp([5.0] + [0.25] * 100)
    pace = made_up.train()
    assert (pace.warmup_steps, pace.warmup_s, pace.is_steady) == (17, 9.0, True)
    assert (pace.measured.steps, pace.measured.train_s) == (8, 2.0)
    assert made_up.primed == [15], "text for the measured steps is read in advance"
    quick = MadeUp([2**-8] * 2000).train()
    assert quick.warmup_s >= 2.0
    assert quick.is_steady
    assert MadeUp([10.0] * 50).train(seconds=1.0).measured.steps == 3, "three at least"
    pace = MadeUp([0.25] * 500).train(seconds=0.1, loss_steps=40)
    assert pace.measured.steps == 40 - 17, "until it has its losses"


def test_warm_up_ends_at_its_limit_and_is_recorded_as_unsteady():
    pace = MadeUp([0.5] * 50).train(warmup_s=4.0)
    assert (pace.warmup_steps, pace.warmup_s, pace.is_steady) == (9, 4.5, False)
    pace = MadeUp([30.0] + [0.25] * 50).train(warmup_s=6.0)
    assert (pace.warmup_steps, pace.is_steady) == (17, True), "the first step does not count"


def test_a_short_run_reserves_half_of_its_steps_for_measuring():
    made_up = MadeUp([2**-8] * 500)
    made_up.run.last_step = 100
    assert made_up.train(seconds=0.1).warmup_steps == 50


@pytest.mark.parametrize(
    ("step_s", "limit_s", "warmup_steps", "steps"),
    [(1.0, 8.0, 4, 4), (3.0, 8.0, 2, 3), (10.0, 5.0, 1, 1)],
)
def test_a_late_trial_measures_fewer_steps(step_s, limit_s, warmup_steps, steps):
    pace = MadeUp([step_s] * 50).train(limit_s=limit_s, loss_steps=20)
    assert (pace.warmup_steps, pace.measured.steps) == (warmup_steps, steps)
