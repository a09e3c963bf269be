"""The points of a round, and their order."""

from __future__ import annotations

import itertools

import pytest
from made_up import MadeUp

from flatout.measure.experiments.losses import Trials
from flatout.measure.experiments.records import Trial, TrialResult
from flatout.measure.experiments.schedule import (
    Budget,
    Experiment,
    Point,
    Schedule,
    in_turn,
    time_left,
)


def test_a_slow_extra_does_not_reduce_the_repeats_of_others():
    late = (Point("slow", {}, is_late=True), Point("late", {}, is_late=True))
    points = (*(Point(name, {}) for name in "abcdef"), *late)
    experiment = Experiment("ablation", points, lambda found: [], total=("b", "a"))
    clock = MadeUp()
    budget = Budget(8, minutes=3, repeats=None, clock=clock.clock)
    schedule, done = Schedule(None, Trials(), budget, clock), []
    for number in range(budget.repeats):
        budget.plan(number)
        done.append([point.name for point in schedule.due(number, experiment)])
        for name in done[-1]:
            took = budget.seconds + (60.0 if name == "slow" else 6.0)
            clock.now += took
            budget.record(name, took)
            schedule.trials.done.append(
                Trial(point=name, round=number, seed=number, result=TrialResult(status="ok"))
            )
    assert [sorted(names) for names in done[:2]] == [list("abcdef")] * 2
    assert done[2][-2:] == ["slow", "late"]
    assert "b" in done[2]
    assert all("slow" not in names for names in done[3:])


def test_a_round_with_time_for_one_point_is_not_started():
    experiment = Experiment(
        "ablation", (Point("a", {}), Point("b", {})), lambda found: [], total=("b", "a")
    )
    clock = MadeUp()
    budget = Budget(2, minutes=1, repeats=None, clock=clock.clock)
    clock.now = 60 - 1.6 * budget.expected_s("a") - 1.5
    schedule = Schedule(None, Trials(), budget, clock)
    assert schedule.due(1, experiment) == []
    clock.now -= budget.expected_s("a")
    assert sorted(point.name for point in schedule.due(1, experiment)) == ["a", "b"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.2, "1 s"), (20, "20 s"), (89.4, "89 s"), (120, "2 min")]
)
def test_the_time_left_is_in_seconds_near_the_end(seconds, shown):
    assert time_left(seconds) == shown


def test_the_order_changes_but_neighbours_stay_neighbours():
    names = list("abcdefg")
    orders = [in_turn(names, number) for number in range(5)]
    assert orders[0] == names
    assert len({order[0] for order in orders}) > 2
    for order in orders:
        assert sorted(order) == names
        apart = [abs(order.index(a) - order.index(b)) for a, b in itertools.pairwise(names)]
        assert sorted(apart)[:-1] == [1] * 5
    assert in_turn([], 3) == []
