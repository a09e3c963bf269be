"""A long curve keeps its peaks and its gaps."""

from __future__ import annotations

import numpy as np

from flatout.measure.report.reading import Curve
from flatout.measure.report.sampling import INTERVALS, MIN_FOR_TREND, outline, trend


def curve(values):
    values = np.asarray(values, dtype=np.float64)
    step = np.arange(len(values), dtype=np.float64)
    return Curve(step, 10 * step, 0.1 * step, values)


def test_a_short_curve_is_drawn_whole():
    short = curve(range(2 * INTERVALS))
    assert outline(short) is short


def test_a_long_curve_keeps_its_ends_and_its_peaks():
    values = np.random.default_rng(0).normal(size=100_000)
    values[31_415], values[92_653] = 50.0, -50.0
    drawn = outline(curve(values))
    assert len(drawn.value) <= 2 * INTERVALS + 2
    assert (drawn.step[0], drawn.step[-1]) == (0, 99_999)
    assert {50.0, -50.0} <= set(drawn.value)
    assert (np.diff(drawn.step) > 0).all()
    assert (drawn.value == values[drawn.step.astype(int)]).all()
    assert (drawn.tokens == 10 * drawn.step).all()


def test_a_stretch_without_values_stays_a_gap():
    values = np.ones(10_000)
    values[4000:6000] = np.nan
    drawn = outline(curve(values))
    assert np.isnan(drawn.value).any()
    assert np.nanmax(drawn.value) == 1


def test_a_trend_is_the_mean_of_intervals():
    values = np.tile([1.0, 3.0], 5000)
    values[:100] = np.nan
    found = trend(curve(values))
    assert np.nanmax(np.abs(found.value - 2.0)) < 0.1
    assert np.isnan(found.value[0])


def test_a_short_curve_has_no_trend():
    assert trend(curve(range(MIN_FOR_TREND - 1))) is None
