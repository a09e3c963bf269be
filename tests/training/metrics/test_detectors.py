"""Shifts, creeps and spikes: found when they are there, one per episode, silent on noise."""

import math
import random

import pytest

from flatout.training.metrics.detectors import Creep, Shift, Spike, is_steady_growth

SEEDS = range(5)


def normal(rng, _before):
    return rng.gauss(0, 1)


def heavy_tailed(rng, _before):
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)


def lasting(rng, before):
    return 0.7 * before + math.sqrt(1 - 0.7**2) * rng.gauss(0, 1)


def with_outliers(rng, _before):
    return rng.gauss(0, 1) - (rng.uniform(5, 40) if rng.random() < 0.05 else 0)


NOISES = (normal, heavy_tailed, lasting, with_outliers)


def noise_of(kind, seed, count):
    rng, value = random.Random(seed), 0.0
    for _ in range(count):
        value = kind(rng, value)
        yield value


def changes_of(detector, values, *more):
    """Every change that the detector reports, with the index of the value that showed it."""
    found = []
    for index, row in enumerate(zip(values, *more, strict=True)):
        change = detector.see(index, *row)
        if change:
            found.append((index, change))
    return found


def fall():
    return Shift(-1, 0.08)


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_noisy_rate_is_no_fall(kind, seed):
    rates = [1000 * (1 + 0.02 * noise) for noise in noise_of(kind, seed, 600)]
    assert changes_of(Shift(-1, 80.0), rates) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fall_of_12_percent_is_found_within_eight_values_and_its_end(seed):
    values = [0.01 * noise for noise in noise_of(normal, seed, 400)]
    values = [v - 0.12 * (200 <= i < 300) for i, v in enumerate(values)]
    (begun, first), (ended, second) = changes_of(fall(), values)
    assert 203 <= begun <= 208
    assert first.since_step == 200
    assert (round(first.usual, 2), round(first.now, 2)) == (0.0, -0.12)
    assert 303 <= ended <= 308
    assert (second.is_over, second.since_step) == (True, 200)


def test_a_fall_that_stays_is_one_alarm():
    values = [0.0, 0.01] * 50 + [-0.2, -0.19] * 500
    assert len(changes_of(fall(), values)) == 1


def test_a_short_dip_is_no_fall():
    values = ([0.0, 0.01] * 20 + [-0.5] * 5) * 10
    assert changes_of(fall(), values) == []


def test_a_slow_drift_is_a_fall():
    values = [-0.0005 * i + (0.002 if i % 2 else 0) for i in range(600)]
    ((index, change),) = changes_of(fall(), values)
    assert 150 < index < 400
    assert not change.is_over


def test_a_rise_is_no_fall_and_a_return_from_it_counts_from_the_first_level():
    values = [0.0, 0.01] * 50 + [0.3, 0.31] * 30 + [0.25, 0.26] * 30
    assert changes_of(fall(), values) == []


def test_a_fall_in_the_first_values_cannot_be_told_from_noise():
    assert changes_of(fall(), [0.0] * 6 + [-0.5] * 12) == []


def creep():
    return Creep()


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_that_varies_does_not_creep(seed):
    rng = random.Random(seed)
    assert changes_of(creep(), [2.0 + rng.uniform(0, 0.5) for _ in range(6000)]) == []
    sawtooth = [2.0 + 0.02 * (i % 50) + 0.001 * rng.random() for i in range(6000)]
    assert changes_of(creep(), sawtooth) == []


def test_memory_that_levels_off_does_not_creep():
    cache = [2.0 - math.exp(-i / 30) for i in range(6000)]
    steps = [1.0 + 0.5 * (i > 100) + 0.5 * (i > 300) for i in range(6000)]
    assert changes_of(creep(), cache) == []
    assert changes_of(creep(), steps) == []


@pytest.mark.parametrize("per_value", [0.002, 0.0004, 0.00005])
def test_a_leak_is_found_and_its_end(per_value):
    """The slower it is, the longer it takes: over 64, 512 or 4,096 values."""
    rng, level, values = random.Random(1), 1.0, []
    for i in range(12_000):
        level += per_value * (i < 6000)
        values.append(level + 0.3 * (rng.random() < 0.3))
    found = changes_of(creep(), values)
    assert [change.is_over for _, change in found] == [False, True]
    assert found[0][0] < {0.002: 100, 0.0004: 600, 0.00005: 4500}[per_value]
    assert found[1][0] > 6000


def test_growth_must_be_in_nearly_every_pair_and_every_quarter():
    assert is_steady_growth(range(16))
    assert not is_steady_growth([0.0] * 8 + [1.0] * 8)
    assert not is_steady_growth([1 - 2.0**-i for i in range(16)])
    assert not is_steady_growth([*range(8), *range(8)])


def losses_of(kind, seed, count=800):
    return [
        2 + 3 * math.exp(-i / 100) + 0.05 * noise
        for i, noise in enumerate(noise_of(kind, seed, count))
    ]


@pytest.mark.parametrize("kind", [normal, lasting, heavy_tailed])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_noisy_loss_has_no_spike(kind, seed):
    losses = losses_of(kind, seed)
    norms = [math.exp(0.3 * noise) for noise in noise_of(normal, seed + 100, len(losses))]
    assert changes_of(Spike(), losses, norms) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spike_is_found_at_its_second_record_and_its_recovery_is_noted(seed):
    losses = losses_of(normal, seed)
    losses[500:520] = [loss + 2 for loss in losses[500:520]]
    (begun, first), (ended, second) = changes_of(Spike(), losses, [1.0] * len(losses))
    assert (begun, first.since_step) == (501, 500)
    assert first.now > first.usual + 1.5
    assert (ended, second.is_over, second.since_step) == (521, True, 500)


def test_a_spike_with_a_steep_gradient_is_found_at_once():
    losses = losses_of(normal, 3)
    norms = [1 + 0.1 * noise for noise in noise_of(normal, 4, len(losses))]
    losses[500], norms[500] = 5.0, 30.0
    (begun, first), (ended, _) = changes_of(Spike(), losses, norms)
    assert (begun, first.now) == (500, 5.0)
    assert ended == 502


def test_one_odd_record_is_no_spike():
    losses = losses_of(normal, 3)
    losses[500] = 5.0
    assert changes_of(Spike(), losses, [1.0] * len(losses)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_where_odd_records_are_frequent_two_in_a_row_are_no_spike(seed):
    losses = losses_of(normal, seed)
    for odd in (*range(200, 700, 20), 401, 561):
        losses[odd] += 1.5
    assert changes_of(Spike(), losses, [1.0] * len(losses)) == []
    losses[720:740] = [5.0] * 20
    (begun, _), _ = changes_of(Spike(), losses, [1.0] * len(losses))
    assert 721 <= begun <= 723


def test_a_loss_that_never_recovers_is_one_spike():
    losses = losses_of(normal, 3)
    losses[400:] = [7.0] * 400
    assert len(changes_of(Spike(), losses, [None] * len(losses))) == 1
