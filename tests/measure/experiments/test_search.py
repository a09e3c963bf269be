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
PLAIN = Setting(4, 4, frozenset({"prefetch"}))


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


def test_other_rows_may_round_differently():
    assert move_to(START).promise.kind == "exact"
    assert (move_to(FEWER).promise.kind, move_to(FEWER).promise.rtol) == ("rounding", 2e-4)
    assert move_to(Setting(4, 8, START.speedups)).promise.kind == "exact"


def test_losses_are_compared_with_the_promise(search_of):
    search = search_of(MadeUpSpeeds(losses={"fused-adamw": 1e-5}))
    for setting in (START, PLAIN):
        search.measure(setting, losses=True)
    assert search.check_losses(move_to(PLAIN)).promise_kept is True
    search = search_of(MadeUpSpeeds(losses={"fused-adamw": 0.1}))
    for setting in (START, PLAIN):
        search.measure(setting, losses=True)
    assert search.check_losses(move_to(PLAIN)).promise_kept is False
    assert search.check_losses(move_to(FEWER)).promise_kept is None


def test_deterministic_runs_decide_exact_promises_where_runs_do_not_repeat(search_of, monkeypatch):
    monkeypatch.setattr(Trials, "of", lambda config: Trials([], repeats_to_the_bit=False))
    machine = MadeUpSpeeds(losses={"prefetch": 1e-9})
    search, without = search_of(machine), Setting(4, 4, frozenset({"fused-adamw"}))
    for setting in (START, without):
        search.measure(setting, losses=True)
    assert search.check_losses(move_to(without)).promise_kept is False
    assert [spec.config["train"]["deterministic"] for spec in machine.specs] == [
        False,
        False,
        True,
        True,
    ]
    search.check_losses(move_to(without))
    assert len(machine.specs) == 4, "each runs once"


def test_a_run_that_compiles_is_slower_over_its_length(search_of):
    machine = MadeUpSpeeds(compile_s={"fused-adamw": 10.0}, noise=0.0)
    search = search_of(machine, train__steps=100)
    for setting in (START, PLAIN):
        search.measure(setting)
    seconds = 100 * 128 / 1000
    assert search.interval(START, PLAIN)[1] == pytest.approx(seconds / (seconds + 10))
    assert gain_of(search, START, PLAIN).median == pytest.approx(1.0)
