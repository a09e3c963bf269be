"""When a step time has settled, on made-up series; and how a trial is paced, on a made-up clock."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from flatout.measure.pace import MOST_WARMUP_STEPS, Pace, settled
from flatout.training.clocks import Spent


def settles_after(series):
    """The number of steps after which the rule says that the warm-up is over."""
    return next((count for count in range(1, len(series) + 1) if settled(series[:count])), None)


def test_a_constant_series_settles_at_the_floor():
    assert settles_after([0.1] * 20) == 9


def test_one_slow_first_step_is_part_of_the_warm_up_and_delays_nothing():
    assert settles_after([30.0] + [0.1] * 20) == 9


def test_a_compile_at_the_second_step_is_left_behind():
    assert settles_after([0.5, 30.0] + [0.1] * 20) == 9


def test_a_slow_decay_is_waited_for():
    series = [0.1 * (1 + 0.9**step) for step in range(100)]
    count = settles_after(series)
    assert series[count] / 0.1 < 1.06
    assert count > 20


def test_a_step_down_is_waited_for():
    series = [0.3] * 7 + [0.1] * 20
    assert settles_after(series) >= 7 + 4


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_does_not_keep_it_waiting(seed):
    draw = random.Random(seed)
    series = [0.1 * draw.lognormvariate(0, 0.2) for _ in range(100)]
    assert settles_after(series) < 40


def test_steps_that_become_slower_have_settled():
    assert settles_after([0.1 * 1.05**step for step in range(30)]) == 9


class MadeUp:
    """A log, a feed and a clock of steps that take the seconds they are told to."""

    def __init__(self, step_s):
        self.now, self.step_s, self.spent_s, self.primed = 0.0, iter(step_s), 0.0, []
        self.run = SimpleNamespace(step=0, last_step=10**6, feed=SimpleNamespace(prime=self.primed.append))

    def spent(self):
        return Spent(steps=self.run.step, train_s=self.spent_s)

    def train(self, **limits):
        pace = Pace(self, **{"seconds": 2.0, "loss_steps": 0, "warmup_s": 1e9, "limit_s": 1e9} | limits, clock=lambda: self.now)
        while not pace.asked(self.run):
            took = next(self.step_s)
            self.now += took
            self.spent_s += took
            self.run.step += 1
        pace.finish()
        return pace


def test_a_trial_warms_up_and_measures_for_its_seconds():
    pace = MadeUp([5.0] + [0.1] * 100).train()
    assert pace.warmup_steps == 9
    assert pace.measured.steps in {20, 21}
    assert pace.measured.train_s == pytest.approx(0.1 * pace.measured.steps)


def test_slow_steps_are_measured_three_times_at_least():
    assert MadeUp([10.0] * 50).train(seconds=1.0).measured.steps == 3


def test_a_trial_goes_on_until_it_has_its_losses():
    made_up = MadeUp([0.1] * 500)
    pace = made_up.train(seconds=0.1, loss_steps=40)
    assert made_up.run.step == 40
    assert pace.measured.steps == 31


def test_warming_up_ends_when_patience_does():
    assert MadeUp([1.0] * 50).train(warmup_s=4.0).warmup_steps == 4
    assert MadeUp(0.99**n for n in range(10**4)).train().warmup_steps == MOST_WARMUP_STEPS


def test_a_trial_that_is_late_makes_do_with_less():
    pace = MadeUp([1.0] * 50).train(limit_s=8.0, loss_steps=20)
    assert (pace.warmup_steps, pace.measured.steps) == (4, 4)
    pace = MadeUp([3.0] * 50).train(limit_s=8.0, loss_steps=20)
    assert (pace.warmup_steps, pace.measured.steps) == (2, 3)
    pace = MadeUp([10.0] * 50).train(limit_s=5.0, loss_steps=20)
    assert (pace.warmup_steps, pace.measured.steps) == (1, 1)


def test_text_for_the_measured_steps_is_taken_before_they_begin():
    made_up = MadeUp([0.1] * 100)
    made_up.train(seconds=2.0)
    assert made_up.primed == [pytest.approx(33, abs=2)]
