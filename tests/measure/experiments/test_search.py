"""Comparisons of settings from trials of an imaginary machine."""

from __future__ import annotations

import pytest
from made_up_speeds import MadeUpSpeeds

from flatout.measure.experiments.losses import Trials
from flatout.measure.experiments.resolving import resolve_here
from flatout.measure.experiments.schedule import Budget, Schedule
from flatout.measure.experiments.space import Move, Setting, Space
from flatout.measure.experiments.tune import Search, Tried

pytestmark = pytest.mark.slow

START = Setting(4, 4, frozenset({"prefetch", "fused-adamw"}))
FEWER = Setting(2, 4, START.speedups)


@pytest.fixture
def search_of(tiny_config, tmp_path):
    def make(machine, **changes):
        config = tiny_config(**{"train__steps": 100_000} | changes)
        budget = Budget(3, minutes=60, repeats=2, clock=machine.clock)
        resolved = resolve_here(config).config
        trials = Trials.of(resolved)
        schedule = Schedule(config, trials, budget, machine, scratch=str(tmp_path))
        return Search(schedule, Space(START, (), (), (), (4,), lambda setting: None), resolved)

    return make


def gain_of(search, one, other=START):
    return search.schedule.trials.gain(search.name(one), search.name(other))


def move_to(one, other=START):
    return Tried(Move("", "speedups"), other, one)


def test_settings_are_named_by_their_difference_from_auto(search_of):
    search = search_of(MadeUpSpeeds())
    assert search.name(START) == "auto"
    other = Setting(2, 8, frozenset({"prefetch", "checkpointing"}))
    assert search.name(other) == "rows 2, prefetch 8, + checkpointing, - fused-adamw"
    assert move_to(START).tolerance.kind == move_to(Setting(4, 8, START.speedups)).tolerance.kind
    assert (move_to(START).tolerance.kind, move_to(FEWER).tolerance.rtol) == ("exact", 2e-4)


def test_one_measurement_decides_only_large_differences(search_of):
    search = search_of(MadeUpSpeeds(rows={4: 1.0, 2: 1.5}, noise=0.0))
    search.measure(START)
    search.measure(FEWER)
    low, median, high = search.interval(FEWER, START)
    assert median == pytest.approx(1.5)
    assert 1.4 < low < 1.5 < high < 1.6
    assert gain_of(search, FEWER).low is None, "one repeat has no interval to report"


def test_a_noisy_start_widens_the_intervals(search_of):
    def width(noise):
        search = search_of(MadeUpSpeeds(noise=noise))
        for search.round in range(3):
            search.measure(START)
        search.round = 0
        search.measure(FEWER)
        low, _, high = search.interval(FEWER, START)
        return high - low

    assert width(0.2) > 2 * width(0.001)


def test_settings_of_different_rounds_are_not_compared(search_of):
    search = search_of(MadeUpSpeeds())
    search.measure(START)
    search.round = 1
    search.measure(FEWER)
    assert search.interval(FEWER, START) is None
    assert gain_of(search, FEWER) is None


def test_deterministic_runs_decide_exact_tolerances_where_runs_do_not_repeat(
    search_of, monkeypatch
):
    monkeypatch.setattr(Trials, "of", lambda config: Trials([], repeats_to_the_bit=False))
    machine = MadeUpSpeeds(losses={"prefetch": 1e-9})
    search, without = search_of(machine), Setting(4, 4, frozenset({"fused-adamw"}))
    for setting in (START, without):
        search.measure(setting, losses=True)
    assert search.check_losses(move_to(without)).within_tolerance is False
    search.check_losses(move_to(without))
    modes = [spec.config["train"]["deterministic"] for spec in machine.specs]
    assert modes == [False, False, True, True], "each runs once"
