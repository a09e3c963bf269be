"""Trials of imaginary settings race in turns: their ratios, intervals and losses."""

from __future__ import annotations

import math
import random

import pytest

from flatout.assembly.recipe import Tolerance
from flatout.errors import Interrupted
from flatout.measure.race import Figure, Race, Spread, TimeIsUp, difference, figure_of, mean_of
from flatout.measure.trial import Result

EXACT = Tolerance.exact()


class Course:
    """A race over settings, which are numbers: how fast each is. Its clock is imaginary."""

    def __init__(self, *, noise=0.0, trial_s=10.0, losses=None, **options):
        self.now, self.order, self.noise, self.trial_s = 0.0, [], noise, trial_s
        self.losses = losses or (lambda setting, seed, number: [3.0 + seed] * 20)
        options = {"clock": lambda: self.now} | options
        self.race = Race(self.start, **options)

    def start(self, setting, seed, limit_s):
        number = len(self.order)
        self.order.append((setting, seed))
        self.now += min(self.trial_s, limit_s)
        if self.trial_s > limit_s:
            return Result(status="timed-out", reason="late")
        if setting < 0:
            return Result(status="failed", reason="It broke.", process_s=self.trial_s)
        factor = 1 + self.noise * random.Random(number).uniform(-1, 1)
        return Result(
            step_s=[0.1 * factor / setting] * 20,
            losses=self.losses(setting, seed, number),
            process_s=self.trial_s,
        )


def test_settings_take_turns_and_a_round_shares_its_seed():
    course = Course(noise=0.02)
    course.race.compare(1.002, 1.0)
    assert course.order[:4] == [(1.0, 0), (1.002, 0), (1.002, 1), (1.0, 1)]
    assert len(course.order) == 10, "it is never decided"


def test_a_clear_gain_ends_the_race_early_and_its_interval_contains_it():
    course = Course(noise=0.004)
    course.race.run(1.0)
    course.race.run(1.0)
    course.race.run(1.0)
    assert course.race.compare(1.3, 1.0) is None
    assert len(course.order) == 3 + 4
    gain = course.race.gain(1.3, 1.0)
    assert gain.low < 1.3 < gain.high
    assert gain.low > 1.2


def test_the_screening_is_in_no_ratio():
    course = Course()
    course.race.run(2.0)
    course.race.run(1.0)
    assert course.race.gain(2.0, 1.0) is None
    course.race.compare(2.0, 1.0, rounds=1)
    assert course.race.gain(2.0, 1.0) == Figure(median=2.0)


def test_trials_of_different_rounds_are_not_compared():
    course = Course()
    course.race.run(1.0, number=1)
    course.race.run(2.0, number=2)
    assert course.race.ratios(2.0, 1.0) == []


def test_a_failure_ends_a_comparison_and_is_reported():
    course = Course()
    assert course.race.compare(-1, 1.0) == "It broke."
    assert course.race.failure(-1).reason == "It broke."
    assert course.race.gain(-1, 1.0) is None


def test_the_time_ends_a_race():
    course = Course(noise=0.5, total_s=45.0)
    course.race.compare(1.0, 1.001)
    assert (len(course.order), course.now) == (4, 40.0)
    with pytest.raises(TimeIsUp):
        course.race.compare(1.0, 1.002)


@pytest.mark.parametrize(
    ("error", "number"),
    [(KeyboardInterrupt, 2), (Interrupted("x.", fix="y.", signal_number=15), 15)],
)
def test_a_signal_ends_a_race_and_keeps_its_trials(error, number):
    course = Course()

    def interrupted(*_):
        raise error

    course.race.run(1.0)
    course.race.start = interrupted
    with pytest.raises(TimeIsUp):
        course.race.run(1.0)
    assert course.race.ended_by_signal == number
    assert len(course.race.results(1.0)) == 1


def test_steps_that_compiled_in_either_trial_are_left_out():
    plain = Result(step_s=[1.0] * 10, warmup_steps=2)
    compiled = Result(step_s=[0.5] * 4 + [60.0] + [0.5] * 5, compiled=[4], warmup_steps=1)
    assert compiled.times_as_fast(plain) == 2.0
    assert plain.times_as_fast(compiled) == 0.5


def test_trials_with_different_steps_are_compared_by_their_means():
    long = Result(step_s=[1.0] * 40, warmup_steps=30)
    short = Result(step_s=[0.5] * 12, warmup_steps=2)
    assert short.times_as_fast(long) == 2.0


def test_few_repeats_use_all_noise_and_five_their_range():
    known = Spread(0.02, 6)
    assert figure_of([1.2], known).low is None
    assert figure_of([1.2, 1.2], Spread(0.02, 1)).low is None, "nobody knows the noise"
    two, four = figure_of([1.2, 1.2], known), figure_of([1.2] * 4, known)
    assert two.low < four.low < 1.2 < four.high < two.high
    three = figure_of([1.2] * 3, known)
    widths = [math.log(each.high / each.low) for each in (two, three, four)]
    assert widths[1] / widths[0] == pytest.approx(0.6698 / 0.7071), "of a median, not of a mean"
    five = figure_of([1.1, 1.3, 1.2, 1.0, 1.4], known)
    assert (five.low, five.median, five.high) == pytest.approx((1.0, 1.2, 1.4))


def test_an_interval_covers_the_truth_as_often_as_it_says():
    draws, covered = random.Random(0), 0
    for _ in range(400):
        values = [1.1 * 2.718 ** draws.gauss(0, 0.05) for _ in range(5)]
        found = figure_of(values, Spread(0.0, 0))
        covered += found.low <= 1.1 <= found.high
    assert 0.91 < covered / 400 < 0.97
    low, mean, high = mean_of([1.0, 2.0, 3.0])
    assert (low, mean, high) == pytest.approx((-0.484, 2.0, 4.484), abs=1e-3)


def checked(losses, tolerance=EXACT, *, rounds=3, **options):
    course = Course(losses=losses)
    course.race.run(1.0)
    course.race.run(1.0)
    course.race.run(2.0)
    for _ in range(rounds - 1):
        course.race.compare(2.0, 1.0, rounds=2, least=0.0, is_open=lambda: True)
    return course.race.check(2.0, 1.0, tolerance, **options)


def test_exact_losses_are_equal_to_the_bit():
    equal = checked(lambda setting, seed, number: [3.0 + seed] * 20)
    assert (equal.within_tolerance, equal.loss_difference) == (True, 0.0)
    wrong = checked(lambda setting, seed, number: [3.0 + seed + 1e-9 * (setting == 2)] * 20)
    assert wrong.within_tolerance is False
    assert "OUT OF TOLERANCE" in wrong.words()


def test_rounding_losses_may_differ_by_the_tolerance():
    def losses(setting, seed, number):
        return [3.0 * (1 + 1e-4 * (setting == 2))] * 20

    assert checked(losses, Tolerance.rounding(rtol=2e-4)).within_tolerance
    assert checked(losses, Tolerance.rounding(rtol=5e-5)).within_tolerance is False


def test_noise_between_unchanged_runs_widens_the_tolerance():
    def losses(setting, seed, number):
        return [3.0 * (1 + 1e-6 * (number % 2) + 5e-6 * (setting == 2))] * 20

    assert checked(losses, Tolerance.rounding(rtol=4.1e-6)).within_tolerance
    assert checked(losses).within_tolerance is False


def test_few_losses_do_not_prove_and_none_are_not_compared():
    few = checked(lambda setting, seed, number: [3.0] * 9)
    assert (few.within_tolerance, few.tolerance_reason) == (None, "9 of 20 losses: not checked")
    none = checked(lambda setting, seed, number: [])
    assert (none.within_tolerance, none.tolerance_reason) == (None, "no losses to compare")
    assert difference([([1.0], [float("nan")])]) is None


def test_a_statistical_tolerance_needs_seeds_and_compares_final_losses():
    def noisy(shift):
        def losses(setting, seed, number):
            return [3.0 - 0.01 * step + 0.01 * (seed + number) % 0.03 + shift * (setting == 2)
                    for step in range(20)]  # fmt: skip

        return losses

    statistical = Tolerance.statistical()
    assert "too few seeds" in checked(noisy(0.0), statistical, rounds=1).tolerance_reason
    assert checked(noisy(0.0), statistical).within_tolerance is None, "two seeds"
    course = Course(losses=noisy(0.0))
    course.race.compare(2.0, 1.0, rounds=5, least=0.0, is_open=lambda: True)
    assert course.race.check(2.0, 1.0, statistical).within_tolerance is True
    course = Course(losses=noisy(0.5))
    course.race.compare(2.0, 1.0, rounds=5, least=0.0, is_open=lambda: True)
    assert course.race.check(2.0, 1.0, statistical).within_tolerance is False
    draws = course.race.check(2.0, 1.0, Tolerance.rounding(rtol=1e-4), draws="dropout")
    assert draws.tolerance_reason == "not checked: dropout"
    lenient = course.race.check(2.0, 1.0, EXACT, is_strict=False)
    assert (lenient.tolerance, lenient.within_tolerance) == ("statistical", False)
