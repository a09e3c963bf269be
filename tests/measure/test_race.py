"""Trials of imaginary settings race in turns: their ratios, intervals and losses."""

import math
import random
from types import SimpleNamespace

import pytest

from flatout.assembly.speedup import Tolerance
from flatout.errors import Interrupted
from flatout.measure import race as racing
from flatout.measure.evidence import Failure
from flatout.measure.intervals import Figure, figure_of, mean_of
from flatout.measure.race import Race, TimeIsUp, difference
from flatout.measure.trial import Result

EXACT, CLOSE = Tolerance.exact(), Tolerance.rounding(rtol=2e-4)


@pytest.fixture
def course(monkeypatch):
    """Return a function that makes a race over settings, which are numbers: how fast each is."""

    def make(*, noise=0.0, losses=lambda setting, seed, number: [3.0 + seed] * 20, **options):
        order = []
        monkeypatch.setattr(racing, "time", SimpleNamespace(monotonic=lambda: 10.0 * len(order)))

        def start(setting, seed, limit_s):
            number = len(order)
            order.append((setting, seed))
            if limit_s < 10.0:
                return Result(failure=Failure(kind="hang", message="late"))
            if setting < 0:
                return Result(failure=Failure(kind="error", message="It broke."), process_s=10.0)
            step_s = 0.1 * (1 + noise * random.Random(number).uniform(-1, 1)) / setting
            return Result(
                step_s=[step_s] * 20, losses=losses(setting, seed, number), process_s=10.0
            )

        tolerance = options.pop("tolerance", EXACT)
        race = Race(start, lambda *_: tolerance, began_s=0.0, **options)
        return race, order

    return make


def test_settings_take_turns_and_a_round_shares_its_seed(course):
    race, order = course(noise=0.02)
    race.compare(1.002, 1.0)
    assert order[:4] == [(1.0, 0), (1.002, 0), (1.002, 1), (1.0, 1)]
    assert len(order) == 10, "it is never decided"


def test_a_clear_gain_ends_the_race_early_and_the_screening_is_in_no_ratio(course):
    race, order = course(noise=0.004)
    for _ in range(3):
        race.run(1.0)
    race.run(1.3)
    assert race.gain(1.3, 1.0) is None
    assert race.compare(1.3, 1.0) is None
    assert len(order) == 4 + 4
    gain = race.gain(1.3, 1.0)
    assert 1.2 < gain.low < 1.3 < gain.high
    assert len(race.ratios(1.3, 1.0)) == 2


def test_trials_of_different_rounds_are_not_compared(course):
    race, _ = course()
    race.run(1.0, number=1)
    race.run(2.0, number=2)
    assert race.ratios(2.0, 1.0) == []


def test_a_failure_or_the_time_ends_a_comparison_and_is_reported(course):
    race, _ = course()
    assert race.compare(-1, 1.0) == "failed: It broke."
    assert race.gain(-1, 1.0) is None
    assert race.row(-1, 1.0, name="x").status == "failed"
    race, order = course(noise=0.5, total_s=45.0)
    assert race.compare(1.0, 1.001) is None
    assert len(order) == 4
    assert race.compare(1.0, 1.002) == "the time was up before it was repeated"
    assert "the time was up" in race.row(1.002, name="y").reason


@pytest.mark.parametrize(
    ("error", "number"),
    [(KeyboardInterrupt, 2), (Interrupted("x.", fix="y.", signal_number=15), 15)],
)
def test_a_signal_ends_a_race_and_keeps_its_trials(course, error, number):
    race, _ = course()
    race.run(1.0)

    def interrupted(*_):
        raise error

    race.start = interrupted
    with pytest.raises(TimeIsUp):
        race.run(1.0)
    assert race.ended_by_signal == number
    assert len(race.results(1.0)) == 1
    race.require_result()


@pytest.mark.parametrize(
    ("step_s", "compiled", "warmup", "ratio"),
    [([0.5] * 4 + [60.0] + [0.5] * 5, [4], 1, 2.0), ([0.5] * 40, [], 30, 2.0)],
    ids=["steps that compiled are left out", "other steps are compared by their means"],
)
def test_trials_are_compared_over_the_same_steps(step_s, compiled, warmup, ratio):
    plain = Result(step_s=[1.0] * 10, warmup_steps=2)
    other = Result(step_s=step_s, compiled=compiled, warmup_steps=warmup)
    assert other.times_as_fast(plain) == ratio
    assert plain.times_as_fast(other) == 1 / ratio


def test_intervals_come_from_measured_noise_and_from_five_repeats_on_from_their_ranks():
    known = (0.02, 6)
    assert figure_of([1.2], known).low is None
    assert figure_of([1.2, 1.2], (0.02, 1)).low is None, "nobody knows the noise"
    two, four = figure_of([1.2, 1.2], known), figure_of([1.2] * 4, known)
    assert two.low < four.low < 1.2 < four.high < two.high
    assert math.log(figure_of([1.2] * 3, known).high / 1.2) == pytest.approx(2.447 * 0.02 * 0.6698)
    five = figure_of([1.0, 1.1, 1.2, 1.3, 1.4], known)
    assert (five.low, five.median, five.high) == pytest.approx((1.0, 1.2, 1.4))
    assert five.inverse().high == pytest.approx(1.0)
    draws, covered = random.Random(0), 0
    for _ in range(400):
        values = [1.1 * 2.718 ** draws.gauss(0, 0.05) for _ in range(5)]
        found = figure_of(values, (0.0, 0))
        covered += found.low <= 1.1 <= found.high
    assert 0.91 < covered / 400 < 0.97
    assert mean_of([1.0, 2.0, 3.0]) == pytest.approx((-0.484, 2.0, 4.484), abs=1e-3)
    assert Figure(median=1.2, low=1.1, high=1.3).gain() == "x1.20 (1.10 to 1.30)"
    assert Figure(median=1.0, low=0.9, high=1.1).gain() == "none (0.90 to 1.10)"


def checked(course, losses, tolerance=EXACT, *, rounds=3, **options):
    race, _ = course(losses=losses, tolerance=tolerance, **options)
    for setting in (1.0, 1.0, 2.0):
        race.run(setting)
    for seed in range(1, rounds):
        for setting in (1.0, 2.0):
            race.run(setting, race.round + seed, seed)
    return race.check(2.0, 1.0)


@pytest.mark.parametrize(
    ("difference", "noise", "tolerance", "kept"),
    [
        (0.0, 0.0, EXACT, True),
        (1e-9, 0.0, EXACT, False),
        (1e-4, 0.0, CLOSE, True),
        (3e-4, 0.0, CLOSE, False),
        (3e-4, 1e-4, CLOSE, True),
        (3e-4, 0.1, CLOSE, False),
    ],
)
def test_losses_are_equal_or_differ_by_rounding_and_twice_the_noise(
    course, difference, noise, tolerance, kept
):
    def losses(setting, seed, number):
        return [(3.0 + seed) * (1 + noise * (number % 2) + difference * (setting == 2))] * 20

    found = checked(course, losses, tolerance)
    assert found.within_tolerance is kept
    assert ("OUT OF TOLERANCE" in found.words()) is not kept


def test_few_losses_do_not_prove_and_none_are_not_compared(course):
    few = checked(course, lambda *_: [3.0] * 9)
    assert (few.within_tolerance, few.tolerance_reason) == (None, "9 of 20 losses: not checked")
    none = checked(course, lambda *_: [])
    assert (none.within_tolerance, none.tolerance_reason) == (None, "no losses to compare")
    assert difference([([1.0], [float("nan")])]) is None


@pytest.mark.parametrize(
    ("shift", "rounds", "options", "kind", "kept"),
    [
        (0.0, 1, {"tolerance": Tolerance.statistical()}, "statistical", None),
        (0.0, 5, {"tolerance": Tolerance.statistical()}, "statistical", True),
        (0.5, 5, {"tolerance": Tolerance.statistical()}, "statistical", False),
        (0.5, 5, {"tolerance": CLOSE, "draws": "dropout"}, "rounding", None),
        (0.5, 5, {"tolerance": EXACT, "is_strict": False}, "statistical", False),
    ],
)
def test_final_losses_are_compared_over_seeds(course, shift, rounds, options, kind, kept):
    def losses(setting, seed, number):
        noise = random.Random(number).gauss(0, 0.01)
        return [3.0 + 0.01 * (seed - step) + noise + shift * (setting == 2) for step in range(20)]

    found = checked(course, losses, rounds=rounds, **options)
    assert (found.tolerance, found.within_tolerance) == (kind, kept)


def test_a_race_goes_on_until_final_losses_are_compared(course):
    race, order = course(losses=lambda setting, *_: [setting] * 20, is_strict=False)
    race.compare(2.0, 1.0, least=0.0)
    assert len(order) >= 2 * racing.MIN_SEEDS
