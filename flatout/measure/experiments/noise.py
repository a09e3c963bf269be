"""The noise of measurements: medians of repeats, with confidence intervals.

Rates and ratios are positive and their noise is multiplicative, so their spread is computed from
logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flatout.measure.experiments.records import Figure

CONFIDENCE = 0.9375
"""Minimum coverage of the intervals: that of the range of five repeats, the usual number."""
MIN_REPEATS = 5
"""With this many repeats, their own spread is used. With fewer, that of all points together."""
MIN_FREEDOM = 4
"""Minimum degrees of freedom of a shared spread."""
MIN_SEEDS = 3
"""Minimum number of differences for an interval of their mean."""
STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
)
"""Student's t for 95%, two-sided, for 1 to 18 degrees of freedom.

The last value is used for more, and is at most 7% too wide.
"""
MEDIAN_DEVIATION = {2: 0.7071, 3: 0.6698, 4: 0.5460}
"""Standard deviation of the median of this many normal samples."""


@dataclass(frozen=True)
class Spread:
    """The noise of one measurement, shared by all points on one machine."""

    deviation: float
    """Standard deviation of the logarithms."""
    freedom: int
    """Degrees of freedom of the estimate."""


EXPECTED = Spread(0.02, 4)
"""The noise of a ratio of two rates that is assumed before anything was repeated: a single
measurement then decides a difference of 6%, and smaller ones are repeated.
"""


def pooled(spreads: Iterable[Spread]) -> Spread:
    """Return several estimates of one noise as one."""
    found = list(spreads)
    freedom = sum(each.freedom for each in found)
    squares = sum(each.freedom * each.deviation**2 for each in found)
    return Spread(math.sqrt(squares / max(freedom, 1)), freedom)


def spread(groups: Iterable[Sequence[float]]) -> Spread:
    """Return the noise of the repeats of all groups, each about its own mean."""
    return pooled(
        Spread(statistics.stdev(map(math.log, group)), len(group) - 1)
        for group in groups
        if len(group) > 1
    )


def median_of(values: Sequence[float], *, shared: Spread) -> Figure:
    """Return the median of positive `values` with its interval.

    With five repeats or more, the interval is that of the sign test, which holds for any noise. For
    five it is their range. Fewer repeats do not show their own spread (half of the time, two of
    them are on the same side of the true value), so the interval is Student's, from the noise of
    all points. It is unknown if that has too few repeats as well. A single repeat has no interval:
    the machine's load may have changed between the two measurements.
    """
    logs = sorted(map(math.log, values))
    median = statistics.median(logs)
    if len(logs) >= MIN_REPEATS:
        outside = left_out(len(logs))
        low, high = logs[outside], logs[-1 - outside]
    elif len(logs) > 1 and shared.freedom >= MIN_FREEDOM:
        half = student(shared.freedom) * shared.deviation * MEDIAN_DEVIATION[len(logs)]
        low, high = median - half, median + half
    else:
        return Figure(median=math.exp(median), low=None, high=None)
    return Figure(median=math.exp(median), low=math.exp(low), high=math.exp(high))


def interval_of(values: Sequence[float], noise: Spread) -> tuple[float, float, float]:
    """Return low, median and high of ratios, for deciding what to repeat.

    Unlike `median_of`, it gives an interval to a single value, from noise that is partly assumed.
    """
    median = statistics.median(map(math.log, values))
    half = student(noise.freedom) * noise.deviation / math.sqrt(len(values))
    return math.exp(median - half), math.exp(median), math.exp(median + half)


def left_out(repeats: int) -> int:
    """Return how many sorted repeats are outside the interval of the sign test, on each side."""
    outside, missed = 0, 2 * 0.5**repeats
    while missed + (more := 2 * math.comb(repeats, outside + 1) * 0.5**repeats) <= 1 - CONFIDENCE:
        outside, missed = outside + 1, missed + more
    return outside


def mean_of(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of at least three paired differences with its interval, (low, mean, high).

    The interval is Student's.
    """
    mean = statistics.fmean(differences)
    half = (
        student(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    )
    return mean - half, mean, mean + half


def student(freedom: int) -> float:
    """Return Student's t for 95%, two-sided."""
    return STUDENT[min(freedom, len(STUDENT)) - 1]
