"""Medians of repeats, and how far they can be trusted.

Rates and ratios are positive and their noise is a factor, so their spread is taken in logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

CONFIDENCE = 0.9375
"""Share of intervals, at least, that hold what they are about: what the range of five repeats
gives, and five are usual.
"""
ENOUGH = 5
"""Repeats from which their own spread is taken; with fewer, that of all rungs together."""
FEWEST_FREEDOM = 4
"""Degrees of freedom that a shared spread must rest on."""
FEWEST_SEEDS = 3
"""Differences that say something of their own mean."""
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
"""Student's t for 95%, two-sided, of 1 to 18 degrees of freedom; that of 18 serves for more, and is
7% too wide at most.
"""
MEDIAN_DEVIATION = {2: 0.7071, 3: 0.6698, 4: 0.5460}
"""Standard deviation of the median of so many normal draws."""


class Figure(BaseModel):
    """A median of repeats with its interval."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    median: float
    """Of the repeats."""
    low: float | None
    """null: too few repeats to say."""
    high: float | None
    """null: too few repeats to say."""

    def verdict(self) -> str:
        """Say what a gain comes to: faster, slower, or no measurable gain."""
        if self.low is None or self.high is None:
            return f"x{self.median:.2f}, too few repeats to be sure"
        if self.low <= 1 <= self.high:
            return "no measurable gain"
        return f"x{self.median:.2f}" if self.median > 1 else f"slower, x{self.median:.2f}"

    def worth(self) -> str:
        """Say what the speedup is worth that was left out: the gain of having it."""
        if self.low is None or self.high is None:
            return f"worth x{self.median:.2f}, too few repeats to be sure"
        if self.low <= 1 <= self.high:
            return "worth nothing measurable"
        return (
            f"worth x{self.median:.2f}"
            if self.median > 1
            else f"faster without it, worth x{self.median:.2f}"
        )


@dataclass(frozen=True)
class Spread:
    """The noise of one measurement, as all rungs on one machine share it."""

    deviation: float
    """Standard deviation of the logarithms."""
    freedom: int
    """Degrees of freedom that it rests on."""


def spread(groups: Iterable[Sequence[float]]) -> Spread:
    """Return the noise that the repeats of all groups show together, each about its own mean."""
    squares, freedom = 0.0, 0
    for group in groups:
        if len(group) > 1:
            squares += (len(group) - 1) * statistics.variance(map(math.log, group))
            freedom += len(group) - 1
    return Spread(math.sqrt(squares / max(freedom, 1)), freedom)


def median_of(values: Sequence[float], *, shared: Spread) -> Figure:
    """Return the median of positive `values` with its interval.

    Of five repeats or more it is that of the sign test, which holds whatever the noise is like: of
    five, their range. Fewer say too little of their own spread (two repeats fall on one side of the
    truth half of the time), so it is Student's, from the noise of all rungs; where that rests on
    too few as well it is unknown. One repeat alone may be anything: a machine's load can change
    between the two that are compared.
    """
    logs = sorted(map(math.log, values))
    median = statistics.median(logs)
    if len(logs) >= ENOUGH:
        outside = left_out(len(logs))
        low, high = logs[outside], logs[-1 - outside]
    elif len(logs) > 1 and shared.freedom >= FEWEST_FREEDOM:
        half = student(shared.freedom) * shared.deviation * MEDIAN_DEVIATION[len(logs)]
        low, high = median - half, median + half
    else:
        return Figure(median=math.exp(median), low=None, high=None)
    return Figure(median=math.exp(median), low=math.exp(low), high=math.exp(high))


def left_out(repeats: int) -> int:
    """Return how many of the sorted repeats lie outside the interval of the sign test on each side."""
    outside, missed = 0, 2 * 0.5**repeats
    while missed + (more := 2 * math.comb(repeats, outside + 1) * 0.5**repeats) <= 1 - CONFIDENCE:
        outside, missed = outside + 1, missed + more
    return outside


def mean_of(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of paired differences between its ends, (low, mean, high), by Student's t;
    three differences at least.
    """
    mean = statistics.fmean(differences)
    half = (
        student(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    )
    return mean - half, mean, mean + half


def student(freedom: int) -> float:
    """Return Student's t for 95%, two-sided."""
    return STUDENT[min(freedom, len(STUDENT)) - 1]
