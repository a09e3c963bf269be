"""Medians of repeats, and how far they can be trusted.

Rates and ratios are positive and their noise is a factor, so everything here happens in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4_000
ENOUGH = 5
"""Repeats from which their own spread is taken; with fewer, that of all rungs together."""
FEWEST_DEVIATIONS = 8
"""Deviations that a shared spread must rest on."""


@dataclass(frozen=True)
class Interval:
    """A median of repeats, and where 95% of the medians of other such repeats would lie."""

    median: float
    low: float | None
    """None: too few repeats to say."""
    high: float | None
    repeats: int

    @property
    def is_known(self) -> bool:
        """Whether there were repeats enough for an interval."""
        return self.low is not None

    def holds(self, value: float) -> bool:
        """Say whether `value` lies inside; an unknown interval holds everything."""
        return self.low is None or self.high is None or self.low <= value <= self.high


def deviations(groups: Iterable[Sequence[float]]) -> list[float]:
    """Return the log-distances of each group's values from its own median, widened for what the median took from so few.

    They are the noise of one measurement, as all rungs on one machine share it.
    """
    found: list[float] = []
    for group in groups:
        if len(group) < 2:
            continue
        logs = np.log(group)
        found += ((logs - np.median(logs)) * math.sqrt(len(group) / (len(group) - 1))).tolist()
    return found


def interval(values: Sequence[float], *, shared: Sequence[float] = (), seed: int = 0) -> Interval:
    """Return the median of positive `values` with its bootstrap interval.

    Five repeats or more are resampled themselves. Fewer say too little of their own spread (two repeats fall on one side of the
    truth half of the time), so the noise is resampled from `shared`, the `deviations` of all rungs; without them it is unknown. One
    repeat alone may be anything: a machine's load can change between the two that are compared.
    """
    logs = np.log(values)
    median = float(np.exp(np.median(logs)))
    draw = np.random.default_rng(seed)
    if len(values) >= ENOUGH:
        medians = np.median(draw.choice(logs, size=(RESAMPLES, len(values))), axis=1)
    elif len(values) > 1 and len(shared) >= FEWEST_DEVIATIONS:
        noise = np.median(draw.choice(np.asarray(shared), size=(RESAMPLES, len(values))), axis=1)
        medians = np.median(logs) - noise
    else:
        return Interval(median, None, None, len(values))
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(median, float(np.exp(low)), float(np.exp(high)), len(values))


def mean_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the mean of differences of either sign with its bootstrap interval; fewer than two say nothing of it.

    The field `median` holds the mean: over few seeds every one should count.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None, len(values))
    means = np.random.default_rng(seed).choice(np.asarray(values), size=(RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(mean, float(low), float(high), len(values))
