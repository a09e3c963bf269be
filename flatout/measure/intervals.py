"""Medians of repeated ratios of speeds, with intervals from measured noise. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from flatout.storage.files import Stored

ROUNDS = 5
LEAST_GAIN = 1.01
"""A change is taken from this ratio on. Less is not worth a change."""
MIN_FREEDOM = 2
"""Fewest degrees of freedom by which noise is known."""
CONFIDENCE = 0.9375
"""Minimum coverage of an interval: that of the range of five repeats, the usual number.

A race that may end after each round looks several times, so that its last interval covers a little
less.
"""
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160),
    *(2.145, 2.131, 2.120, 2.110, 2.101),
)
"""Student's t for 95%, two-sided, for 1 to 18 degrees of freedom.

The last value is used for more, and is at most 7% too wide.
"""
MEDIAN_DEVIATION = {2: 0.7071, 3: 0.6698, 4: 0.5460}
"""Standard deviation of the median of this many normal samples."""


class Figure(Stored):
    """A median of repeats, with its interval."""

    median: float
    """Median of the repeats."""
    low: float | None = None
    """Lower end of the interval. Null with too few repeats."""
    high: float | None = None
    """Upper end of the interval. Null with too few repeats."""

    def between(self) -> str:
        """Return the interval in brackets, or an empty string if it is unknown."""
        return "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"

    def times(self) -> str:
        """Return a ratio of speeds as a part of a sentence, with its interval."""
        return f"{self.median:.2f} times as fast{self.between()}"

    def gain(self) -> str:
        """Return a ratio of speeds in a few words. `none`: its interval contains 1."""
        if self.low is None or self.high is None:
            return f"x{self.median:.2f}, unsure: too few repeats"
        what = "none" if self.low <= 1 <= self.high else f"x{self.median:.2f}"
        return f"{what}{self.between()}"

    def inverse(self) -> Figure:
        """Return the ratio of the same two rates the other way round."""
        low, high = (end and 1 / end for end in (self.high, self.low))
        return Figure(median=1 / self.median, low=low, high=high)


def spread(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the noise of the repeats of all groups of positive values, each about its own mean:
    the standard deviation of their logarithms, and its degrees of freedom.
    """
    logs = [[*map(math.log, group)] for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in logs)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in logs)
    return math.sqrt(squares / max(freedom, 1)), freedom


def figure_of(values: Sequence[float], noise: tuple[float, int]) -> Figure:
    """Return the median of positive `values` with its interval.

    With five repeats or more, the interval is that of the sign test, which holds for any noise: for
    five their range. Fewer do not show their own spread (half of the time, two of them are on the
    same side of the true value), so the interval is Student's, from all noise that was measured. A
    single repeat has no interval: the machine's load may have changed between two measurements.
    """
    logs = sorted(map(math.log, values))
    median, (deviation, freedom) = statistics.median(logs), noise
    if len(logs) >= ROUNDS:
        outside = left_out(len(logs))
        low, high = logs[outside], logs[-1 - outside]
    elif len(logs) > 1 and freedom >= MIN_FREEDOM:
        half = student(freedom) * deviation * MEDIAN_DEVIATION[len(logs)]
        low, high = median - half, median + half
    else:
        return Figure(median=math.exp(median))
    return Figure(median=math.exp(median), low=math.exp(low), high=math.exp(high))


def left_out(repeats: int) -> int:
    """Return how many sorted repeats are outside the interval of the sign test, on each side."""
    outside, missed = 0, 2 * 0.5**repeats
    while missed + (more := 2 * math.comb(repeats, outside + 1) * 0.5**repeats) <= 1 - CONFIDENCE:
        outside, missed = outside + 1, missed + more
    return outside


def mean_of(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of some differences with Student's interval: low, mean, high."""
    mean, number = statistics.fmean(differences), len(differences)
    half = student(number - 1) * statistics.stdev(differences) / math.sqrt(number)
    return mean - half, mean, mean + half


def student(freedom: int) -> float:
    """Return Student's t for 95%, two-sided."""
    return STUDENT[min(freedom, len(STUDENT)) - 1]
