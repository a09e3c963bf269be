"""Reduces a curve to what a chart can show: its lowest and highest points, and its trend."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flatout.measure.report.reading import Curve

INTERVALS = 600
"""Intervals of a long curve; each contributes its lowest and its highest point."""
TREND_INTERVALS = 150
"""Intervals whose means are the trend."""
MIN_FOR_TREND = 4 * TREND_INTERVALS
"""Shorter curves have no trend: they can be read as they are."""


def outline(curve: Curve) -> Curve:
    """Return the points to draw: all of them, or the lowest and highest of each interval.

    No peak is lost. An interval without a finite value contributes one point, a gap in the line.
    """
    count = len(curve.value)
    if count <= 2 * INTERVALS:
        return curve
    kept = [0, count - 1]
    edges = np.linspace(0, count, INTERVALS + 1).astype(np.int64)
    for start, end in pairwise(edges):
        values = curve.value[start:end]
        if np.isfinite(values).any():
            kept += [start + int(np.nanargmin(values)), start + int(np.nanargmax(values))]
        else:
            kept.append(start)
    return _at(curve, np.unique(kept))


def trend(curve: Curve) -> Curve | None:
    """Return the means of TREND_INTERVALS intervals, at their middles; None for a short curve."""
    count = len(curve.value)
    if count < MIN_FOR_TREND:
        return None
    edges = np.linspace(0, count, TREND_INTERVALS + 1).astype(np.int64)
    finite = np.isfinite(curve.value)
    sums = np.add.reduceat(np.where(finite, curve.value, 0.0), edges[:-1])
    numbers = np.add.reduceat(finite.astype(np.float64), edges[:-1])
    means = np.divide(sums, numbers, out=np.full(TREND_INTERVALS, np.nan), where=numbers > 0)
    middle = _at(curve, (edges[:-1] + edges[1:]) // 2)
    return Curve(middle.step, middle.tokens, middle.elapsed_s, means)


def _at(curve: Curve, rows: NDArray[np.int64]) -> Curve:
    return Curve(*(getattr(curve, f.name)[rows] for f in fields(Curve)))
