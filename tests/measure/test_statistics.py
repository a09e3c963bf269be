"""Intervals against cases whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flatout.measure.statistics import ENOUGH, FEWEST_DEVIATIONS, deviations, interval, mean_interval


def test_five_repeats_or_more_are_resampled_themselves():
    found = interval([90.0, 100.0, 110.0, 95.0, 105.0])
    assert found.median == pytest.approx(100.0)
    assert 89.999 <= found.low < 100.0 < found.high <= 110.001
    assert found.repeats == 5
    assert found.holds(100.0)
    assert not found.holds(111.0)


def test_equal_repeats_have_no_width():
    found = interval([7.0] * ENOUGH)
    assert (found.low, found.high) == pytest.approx((7.0, 7.0))


def test_the_same_values_give_the_same_interval():
    values = [1.0, 1.1, 0.9, 1.05, 0.97, 1.2]
    assert interval(values) == interval(values)


def test_few_repeats_say_nothing_of_their_spread_by_themselves():
    found = interval([1.2, 1.2])
    assert not found.is_known
    assert found.holds(1.0)


def test_few_repeats_borrow_the_spread_of_all():
    shared = deviations([[1 - d, 1 + d] for d in (0.02, 0.05, 0.1, 0.2)])
    assert len(shared) == FEWEST_DEVIATIONS
    found = interval([1.05, 1.05], shared=shared)
    assert found.is_known
    assert found.low < 1.0 < found.high
    assert not interval([1.05], shared=shared).is_known


def test_deviations_are_those_of_one_measurement():
    """Two values show half of their distance each; one measurement's noise is wider than that, by the root of two."""
    assert deviations([[1.0, math.e], [5.0]]) == pytest.approx([-math.sqrt(2) / 2, math.sqrt(2) / 2])
    draw = np.random.default_rng(0)
    noise = deviations(np.exp(draw.normal(0, 0.1, (4000, 2))))
    assert np.std(noise) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_the_interval_of_no_gain_holds_one_about_as_often_as_it_says(repeats):
    draw = np.random.default_rng(repeats)
    held = []
    for _ in range(150):
        rungs = np.exp(draw.normal(0, 0.05, (12, repeats)))
        held.append(interval(rungs[0].tolist(), shared=deviations(rungs)).holds(1.0))
    assert np.mean(held) > 0.87


def test_the_mean_of_differences():
    found = mean_interval([0.1, -0.1, 0.05, -0.05])
    assert found.median == pytest.approx(0.0)
    assert found.low < 0 < found.high
    assert mean_interval([0.3, 0.31, 0.29]).low > 0
    assert not mean_interval([0.3]).is_known
