"""Comparisons of settings from trials of an imaginary machine."""

from __future__ import annotations

import pytest
from made_up_speeds import MadeUpSpeeds

from flatout.measure.trials.budget import Budget
from flatout.measure.trials.resolving import resolve_here
from flatout.measure.tune.race import Race, promise_of
from flatout.measure.tune.space import Setting

pytestmark = pytest.mark.slow

START = Setting(4, 4, frozenset({"prefetch", "fused-adamw"}))
FEWER = Setting(2, 4, START.speedups)
PLAIN = Setting(4, 4, frozenset({"prefetch"}))


@pytest.fixture
def race_of(tiny_config, tmp_path):
    def make(machine, **changes):
        config = tiny_config(**{"train__steps": 100_000} | changes)
        budget = Budget(3, minutes=60, repeats=2, clock=machine.clock)
        notes = []
        return Race(
            config, resolve_here(config), START, budget, machine, str(tmp_path), notes.append
        )

    return make


def test_settings_are_named_by_their_difference_from_auto(race_of):
    race = race_of(MadeUpSpeeds())
    assert race.name(START) == "auto"
    other = Setting(2, 8, frozenset({"prefetch", "checkpointing"}))
    assert race.name(other) == "rows 2, prefetch 8, + checkpointing, - fused-adamw"


def test_one_measurement_decides_only_large_differences(race_of):
    race = race_of(MadeUpSpeeds(rows={4: 1.0, 2: 1.5}, noise=0.0))
    race.measure(START, 0)
    race.measure(FEWER, 0)
    low, median, high = race.interval(FEWER, START)
    assert median == pytest.approx(1.5)
    assert 1.4 < low < 1.5 < high < 1.6
    assert race.gain(FEWER, START).low is None, "one repeat has no interval to report"


def test_a_noisy_start_widens_the_intervals(race_of):
    def width(noise):
        race = race_of(MadeUpSpeeds(noise=noise))
        for number in range(3):
            race.measure(START, number)
        race.measure(FEWER, 0)
        low, _, high = race.interval(FEWER, START)
        return high - low

    assert width(0.2) > 2 * width(0.001)


def test_settings_of_different_rounds_are_not_compared(race_of):
    race = race_of(MadeUpSpeeds())
    race.measure(START, 0)
    race.measure(FEWER, 1)
    assert race.interval(FEWER, START) is None
    assert race.gain(FEWER, START) is None


def test_other_rows_may_round_differently():
    assert promise_of(START, START).kind == "exact"
    assert (promise_of(FEWER, START).kind, promise_of(FEWER, START).rtol) == ("rounding", 2e-4)
    assert promise_of(Setting(4, 8, START.speedups), START).kind == "exact"


def test_losses_are_compared_with_the_promise(race_of):
    race = race_of(MadeUpSpeeds(losses={"fused-adamw": 1e-5}))
    for setting in (START, PLAIN):
        race.measure(setting, 0, losses=True)
    assert race.parity(PLAIN, START).kept is True
    race = race_of(MadeUpSpeeds(losses={"fused-adamw": 0.1}))
    for setting in (START, PLAIN):
        race.measure(setting, 0, losses=True)
    assert race.parity(PLAIN, START).kept is False
    assert race.parity(FEWER, START).kept is None


def test_deterministic_runs_decide_exact_promises_where_runs_do_not_repeat(race_of, monkeypatch):
    from flatout.measure.tune import race as tune_race

    monkeypatch.setattr(tune_race, "repeats_to_the_bit", lambda config: False)
    machine = MadeUpSpeeds(losses={"prefetch": 1e-9})
    race, without = race_of(machine), Setting(4, 4, frozenset({"fused-adamw"}))
    for setting in (START, without):
        race.measure(setting, 0, losses=True)
    assert race.parity(without, START).kept is False
    assert [spec.config["train"]["deterministic"] for spec in machine.specs] == [
        False,
        False,
        True,
        True,
    ]
    race.parity(without, START)
    assert len(machine.specs) == 4, "each runs once"


def test_a_run_that_compiles_is_slower_over_its_length(race_of):
    machine = MadeUpSpeeds(compile_s={"fused-adamw": 10.0}, noise=0.0)
    race = race_of(machine, train__steps=100)
    for setting in (START, PLAIN):
        race.measure(setting, 0)
    seconds = 100 * 128 / 1000
    assert race.interval(START, PLAIN)[1] == pytest.approx(seconds / (seconds + 10))
    assert race.gain(START, PLAIN).median == pytest.approx(1.0)
