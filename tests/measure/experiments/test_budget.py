"""The division of time over trials, on an imaginary clock."""

from __future__ import annotations

import collections

import pytest

from flatout.measure.experiments.schedule import (
    DEFAULT_SECONDS,
    LONGEST_TRIAL_S,
    MAX_SECONDS,
    MIN_SECONDS,
    REPEATS,
    USUAL_OVERHEAD_S,
    Budget,
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def rounds_of(names, *, cost, num_points=None, **limits):
    """Run a bench; return the trials of each round, the seconds that it took, and its budget."""
    clock = Clock()
    budget = Budget(num_points or len(names), repeats=None, clock=clock, **limits)
    rounds = []
    for number in range(budget.repeats):
        budget.plan(number)
        done = []
        for name in budget.fits(names) if number else names:
            if budget.allows(name):
                took = cost(name, budget)
                clock.now += took
                budget.record(name, took)
                done.append(name)
        if not done:
            break
        rounds.append(done)
    return rounds, clock.now, budget


def points(count):
    return [f"point {n}" for n in range(count)]


def test_without_minutes_there_are_five_rounds_of_five_seconds():
    budget = Budget(10, minutes=None, repeats=None, clock=Clock())
    assert (budget.repeats, budget.seconds) == (REPEATS, DEFAULT_SECONDS)
    budget.plan(3)
    assert budget.seconds == DEFAULT_SECONDS
    assert budget.allows("anything")
    assert budget.timeout_s("anything") == LONGEST_TRIAL_S > budget.limit_s(10) > 60, (
        "a slow trial ends by itself before it is killed"
    )
    assert budget.fits(["a", "b"]) == ["a", "b"]
    assert budget.remaining_s(["a", "b"], 2) == 3 * 2 * (USUAL_OVERHEAD_S + DEFAULT_SECONDS)
    assert Budget(10, minutes=None, repeats=3, clock=Clock()).repeats == 3


@pytest.mark.parametrize(
    ("minutes", "overhead_s"), [(6, 4.0), (6, 8.0), (2, 3.0), (20, 4.0), (60, 4.0), (1, 9.0)]
)
def test_it_stays_within_its_minutes(minutes, overhead_s):
    rounds, seconds, _ = rounds_of(
        points(17), minutes=minutes, cost=lambda name, budget: overhead_s + budget.seconds
    )
    assert seconds <= 60 * minutes
    assert len(rounds) <= REPEATS


def test_six_minutes_are_enough_for_an_ablation_with_the_longest_warm_ups():
    rounds, seconds, _ = rounds_of(
        points(18),
        num_points=23,
        minutes=6,
        cost=lambda name, budget: 4.0 + budget.warmup_s + budget.seconds,
    )
    assert seconds <= 360
    assert len(rounds[0]) == 18
    assert len(rounds[1]) >= 9
    rounds, _, _ = rounds_of(points(17), minutes=6, cost=lambda name, budget: 6.0 + budget.seconds)
    assert [len(done) for done in rounds[:2]] == [17, 17]


def test_the_warm_up_limit_follows_the_measured_time():
    for count, minutes, limit_s in ((10, None, 15), (40, 6, 6), (2, 60, 20)):
        assert Budget(count, minutes=minutes, repeats=None, clock=Clock()).warmup_s == limit_s


def test_with_time_to_spare_there_are_five_rounds_and_longer_trials():
    rounds, _, budget = rounds_of(
        points(3), minutes=10, cost=lambda name, budget: 4.0 + budget.seconds
    )
    assert [len(done) for done in rounds] == [3] * 5
    assert budget.seconds == MAX_SECONDS


def test_a_slow_point_gets_fewer_repeats_and_the_others_keep_theirs():
    rounds, seconds, _ = rounds_of(
        [*"abcdefgh", "slow"],
        minutes=5,
        cost=lambda name, budget: (110.0 if name == "slow" else 4.0) + budget.seconds,
    )
    counts = collections.Counter(name for done in rounds for name in done)
    assert counts.pop("slow") == 1
    assert min(counts.values()) >= 2
    assert seconds <= 300


def test_too_little_time_for_one_round_measures_the_first_points():
    names = points(20)
    rounds, _, budget = rounds_of(names, minutes=1, cost=lambda name, budget: 7.0 + budget.seconds)
    assert budget.seconds == MIN_SECONDS
    assert rounds[0] == names[: len(rounds[0])]
    assert 3 < len(rounds[0]) < 8


def test_no_trial_may_outlast_the_minutes():
    clock = Clock()
    budget = Budget(4, minutes=4, repeats=None, clock=clock)
    assert budget.timeout_s("unknown") == 120, "nothing has been measured yet"
    budget.record("fast", 7.0)
    assert budget.timeout_s("unknown") == 60
    clock.now = 230
    assert 230 + budget.timeout_s("unknown") < 240
    assert 230 + budget.limit_s(1) < 240, "and the last one ends by itself before it is killed"
    clock.now = 400
    assert budget.timeout_s("unknown") == 1.0


def test_extras_wait_for_two_rounds_only_when_there_is_little_time():
    for minutes, repeats, first in ((5, 1, 0), (5, 2, 1), (5, 3, 2), (5, None, 2), (None, None, 0)):
        assert Budget(9, minutes=minutes, repeats=repeats, clock=Clock()).late_from == first


def test_the_limit_of_a_trial_is_its_fair_share():
    budget = Budget(10, minutes=6, repeats=None, clock=Clock())
    assert budget.limit_s(20) == pytest.approx(2 * 358.5 / 20 - 4)
    assert budget.limit_s(1000) == 3.0
    assert budget.remaining_s(["a"] * 100, 4) == pytest.approx(358.5)


def test_when_every_point_has_failed_there_is_nothing_to_plan():
    budget = Budget(2, minutes=6, repeats=None, clock=Clock())
    seconds = budget.seconds
    budget.drop("a")
    budget.drop("b")
    budget.plan(1)
    assert budget.seconds == seconds
