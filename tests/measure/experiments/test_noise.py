"""Intervals in cases with a known answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flatout.measure.experiments.noise import (
    CONFIDENCE,
    Spread,
    left_out,
    mean_of,
    median_of,
    spread,
    student,
)
from flatout.measure.experiments.records import Figure

pytestmark = pytest.mark.slow

UNKNOWN = Spread(0.0, 0)


@pytest.mark.parametrize(
    ("low", "high", "median", "verdict"),
    [
        (1.1, 1.3, 1.2, "x1.20"),
        (0.98, 1.05, 1.01, "no measurable gain"),
        (1.0, 1.2, 1.1, "no measurable gain"),
        (0.8, 0.9, 0.87, "slower, x0.87"),
        (None, None, 4.37, "unsure: too few repeats"),
    ],
)
def test_a_gain_in_words(low, high, median, verdict):
    assert Figure(median=median, low=low, high=high).verdict() == verdict


@pytest.mark.parametrize(("repeats", "outside"), [(5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (20, 5)])
def test_the_interval_of_more_repeats_is_that_of_the_sign_test(repeats, outside):
    """From tables: of 9 values the second, of 12 the third, of 20 the sixth."""
    assert left_out(repeats) == outside
    missed = 2 * sum(math.comb(repeats, k) for k in range(outside + 1)) / 2**repeats
    assert missed <= 1 - CONFIDENCE < missed + 2 * math.comb(repeats, outside + 1) / 2**repeats


def test_the_interval_of_five_repeats_is_their_range():
    found = median_of([90.0, 100.0, 110.0, 95.0, 105.0], shared=UNKNOWN)
    assert (found.low, found.median, found.high) == pytest.approx((90.0, 100.0, 110.0))


def test_few_repeats_use_the_shared_spread():
    found = median_of([1.2, 1.2], shared=UNKNOWN)
    assert (found.median, found.low, found.high) == (pytest.approx(1.2), None, None)
    shared = spread([[1 - d, 1 + d] for d in (0.02, 0.05, 0.1, 0.2)])
    assert shared.freedom == 4
    found = median_of([1.05, 1.05], shared=shared)
    assert found.low < 1.0 < found.high
    assert median_of([1.05], shared=shared).low is None, "a single repeat has no interval"


def test_the_spread_is_that_of_one_measurement():
    assert spread([[1.0, math.e], [5.0]]) == Spread(pytest.approx(math.sqrt(0.5)), 1)
    noise = np.random.default_rng(0).normal(0, 0.1, (4000, 2))
    assert spread(np.exp(noise).tolist()).deviation == pytest.approx(0.1, rel=0.05)
    assert spread([]) == UNKNOWN


@pytest.mark.parametrize(("repeats", "rows"), [(2, 4), (3, 20), (5, 4), (10, 20)])
def test_intervals_have_their_stated_coverage(repeats, rows):
    """2,000 benches of pure noise give the coverage to within 1%. One-sided, 3% is allowed."""
    noise = np.exp(np.random.default_rng(repeats).normal(0, 0.05, (2000, rows, repeats))).tolist()
    found = [median_of(bench[0], shared=spread(bench)) for bench in noise]
    assert np.mean([figure.low <= 1 <= figure.high for figure in found]) > CONFIDENCE - 0.016


def test_the_mean_of_differences_has_students_interval():
    half = 4.303 / math.sqrt(3)
    assert mean_of([1.0, 2.0, 3.0]) == pytest.approx((2 - half, 2.0, 2 + half))
    draw = np.random.default_rng(0)
    for seeds in (3, 5):
        ends = [mean_of(draw.normal(0, 1, seeds).tolist()) for _ in range(2000)]
        inside = np.mean([low <= 0 <= high for low, _, high in ends])
        assert inside == pytest.approx(0.95, abs=0.016)
    assert [student(freedom) for freedom in (1, 4, 18, 500)] == [12.706, 2.776, 2.101, 2.101]
