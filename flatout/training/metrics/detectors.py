"""Change detection in the metrics of a run: a shift that stays, a creep, a spike.

All use medians and ranks, which single outliers do not move, and compare with the noise of the
metric itself. They need constant memory and a few microseconds per value. How often they are wrong
and how late they are right was measured: benchmarks/results/alarms.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low
from typing import Literal, NamedTuple

DEVIATIONS_PER_MAD = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""
RECENT, EXCEPTIONS = 8, 2
"""A shift stays when all of the last RECENT values but EXCEPTIONS have it."""
USUAL, MIN_USUAL = 128, 16
"""Most and fewest earlier values that a shift is compared with."""
SETTLED = 64
"""With fewer earlier values than this, their noise is not known well and counts for more."""
REFRESH = 8
"""The noise is computed again after this many values."""
BLOCKS = 16
"""A creep is sought in the minima of this many blocks of values."""
BLOCK_VALUES = (4, 32, 256)
"""Values per block: a creep is sought over 64, 512 and 4,096 values."""
WARM_UP = 32
"""First values of a run in which memory is expected to grow."""
MIN_GROWTH_GIB, MIN_GROWTH_SHARE = 1 / 32, 0.02
"""Smallest growth of memory in the time over which a creep is sought."""
MIN_CONCORDANCE = 0.9
"""Minimum of Kendall's tau of a creep: 4.9 standard deviations for 16 independent values."""
MIN_QUARTER = 0.25
"""Minimum share of the growth in each of the later three quarters. It is 1/3 when it is even."""
SPIKE_WINDOW, MIN_SPIKE_WINDOW = 32, 16
"""Most and fewest earlier losses that a spike is compared with."""
SPIKE_DEVIATIONS, SPIKE_OVER = 6.0, 3.0
"""A spike is this many standard deviations above the trend, until it is that many."""
ODD_WINDOW = 128
"""Losses of the past that tell how often single ones are far above the trend."""
MIN_SPIKE = 0.03
"""Minimum height of a spike as a share of the loss."""


@dataclass(frozen=True)
class Change:
    """A metric that has left its usual range, or has returned to it."""

    since_step: int
    """Step of the first value of the change."""
    usual: float
    now: float
    is_over: bool = False


class _Point(NamedTuple):
    step: int
    value: float


def deviation(values: Iterable[float], center: float) -> float:
    """Return a robust standard deviation about `center`."""
    return DEVIATIONS_PER_MAD * median_low(abs(value - center) for value in values)


class Shift:
    """Detects that a metric rises (`direction` 1) or falls (-1) by more than `margin`, and stays.

    The metric must also leave its noise: three standard deviations of single values, six of the
    recent ones together, which noise that lasts for several values does not exceed either.
    """

    def __init__(self, direction: Literal[-1, 1], margin: float) -> None:
        self._direction, self._margin = direction, margin
        self._recent: deque[_Point] = deque(maxlen=RECENT)
        self._earlier: deque[tuple[float, float]] = deque(maxlen=USUAL)
        """Earlier values, each with what the recent ones of its time reached together."""
        self._num_earlier = 0
        self._level, self._reach = 0.0, math.inf
        """The usual level, and how far single values may be from it."""
        self._first_level: float | None = None
        self._since: int | None = None
        """When the change that is not over began."""

    def see(self, step: int, value: float) -> Change | None:
        """Take the next value, and return a change that begins or is over with it."""
        if len(self._recent) == RECENT and self._since is None:
            self._learn(self._recent[0].value, self._together())
        self._recent.append(_Point(step, value * self._direction))
        if len(self._recent) < RECENT:
            return None
        if self._since is not None:
            near = self._level + self._reach / 2
            if sum(point.value <= near for point in self._recent) < RECENT - EXCEPTIONS:
                return None
            since, self._since = self._since, None
            return self._change(since, list(self._recent), is_over=True)
        if not self._is_outside(self._together()):
            return None
        self._since = next(p.step for p in self._recent if self._is_outside(p.value))
        return self._change(self._since, [p for p in self._recent if p.step >= self._since])

    @property
    def is_suspicious(self) -> bool:
        """Whether the last value is outside the usual range."""
        return bool(self._recent) and self._is_outside(self._recent[-1].value)

    def _is_outside(self, value: float) -> bool:
        return value > self._level + self._reach

    def _together(self) -> float:
        """Return the value that all recent ones but EXCEPTIONS reach."""
        return sorted(point.value for point in self._recent)[EXCEPTIONS]

    def _change(self, since: int, points: list[_Point], is_over: bool = False) -> Change:
        now = median(point.value for point in points)
        return Change(since, self._level * self._direction, now * self._direction, is_over)

    def _learn(self, value: float, together: float) -> None:
        if self._is_outside(value):
            return
        self._earlier.append((value, together))
        self._num_earlier += 1
        if self._num_earlier < MIN_USUAL or self._num_earlier % REFRESH:
            return
        values, togethers = zip(*self._earlier, strict=True)
        self._level = median_low(values)
        is_settled = len(values) >= SETTLED
        self._reach = max(
            self._margin,
            (3.0 if is_settled else 4.5) * deviation(values, self._level),
            6.0 * deviation(togethers, median_low(togethers)),
        )
        if self._first_level is None and is_settled:
            self._first_level = self._level  # so that a slow drift is a shift too
        if self._first_level is not None:
            self._level = min(self._level, self._first_level)


class Creep:
    """Detects that memory, in GiB, grows and grows.

    It compares the minima of blocks of values, because peaks come and go. The growth must not level
    off, as that of an allocator's cache does.
    """

    def __init__(self) -> None:
        self._left_to_skip = WARM_UP
        self._blocks: dict[int, list[_Point]] = {size: [] for size in BLOCK_VALUES}
        """The last values, by the number of values of a block."""
        self._minima = {size: deque[_Point](maxlen=BLOCKS) for size in BLOCK_VALUES}
        self._growing: int | None = None
        """The size of the blocks in which a creep that is not over was found."""

    def see(self, step: int, value: float) -> Change | None:
        """Take the next value, and return a creep that begins or is over with it."""
        if self._left_to_skip:
            self._left_to_skip -= 1
            return None
        found = None
        for size, block in self._blocks.items():
            block.append(_Point(step, value))
            if len(block) == size:
                self._minima[size].append(min(block, key=lambda point: point.value))
                block.clear()
                found = found or self._look(size)
        return found

    def _look(self, size: int) -> Change | None:
        minima = self._minima[size]
        if len(minima) < BLOCKS:
            return None
        values, first, last = [point.value for point in minima], minima[0], minima[-1]
        quarters = _quarters(values)
        growth = quarters[-1] - quarters[0]
        if self._growing is None:
            is_large = growth > max(MIN_GROWTH_GIB, MIN_GROWTH_SHARE * first.value)
            if not is_large or not is_steady_growth(values):
                return None
            self._growing = size
            return Change(first.step, first.value, last.value)
        if size != self._growing or growth > MIN_GROWTH_GIB / 2:
            return None
        self._growing = None
        for each in self._minima.values():  # what has ended must not be found on a longer scale
            each.clear()
        return Change(first.step, first.value, last.value, is_over=True)


def _quarters(values: Sequence[float]) -> list[float]:
    size = len(values) // 4
    return [median_low(values[i : i + size]) for i in range(0, size * 4, size)]


def is_steady_growth(values: Sequence[float]) -> bool:
    """Return whether nearly every later value is higher, and the last quarter still grows."""
    pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1 :]]
    concordance = sum((b > a) - (b < a) for a, b in pairs) / len(pairs)
    if concordance < MIN_CONCORDANCE:
        return False
    quarters = _quarters(values)
    growth = quarters[-1] - quarters[0]
    return all(later - earlier >= MIN_QUARTER * growth for earlier, later in pairwise(quarters))


class Spike:
    """Detects a training loss far above its trend, in two records or with a gradient to match.

    Where single losses were far above it before, it takes up to four records in a row.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._norms: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._suspects: list[_Point] = []
        self._odd: deque[bool] = deque(maxlen=ODD_WINDOW)
        """Whether each of the last losses was far above the trend, but part of no spike."""
        self._calm = 0
        self._trend = self._spread = 0.0
        self._since: int | None = None
        """When the spike that is not over began."""

    def see(self, step: int, loss: float, grad_norm: float | None) -> Change | None:
        """Take the next loss, and return a spike that begins or is over with it."""
        if self._since is not None:
            height = max(SPIKE_OVER * self._spread, MIN_SPIKE / 2 * abs(self._trend))
            self._calm = self._calm + 1 if loss <= self._trend + height else 0
            if self._calm < 2:
                return None
            since, self._since = self._since, None
            return Change(since, self._trend, loss, is_over=True)
        if self._is_far_above(loss):
            self._suspects.append(_Point(step, loss))
            needed = 2 + min(sum(self._odd), 2)
            if len(self._suspects) < needed and not self.is_steep(grad_norm):
                return None
            self._since, self._calm = self._suspects[0].step, 0
            highest = max(point.value for point in self._suspects)
            self._suspects.clear()
            return Change(self._since, self._trend, highest)
        self._odd.extend([True] * len(self._suspects) + [False])
        self._suspects.clear()
        self._losses.append(loss)
        if grad_norm is not None:
            self._norms.append(grad_norm)
        return None

    def _is_far_above(self, loss: float) -> bool:
        """Return whether a loss is above its trend. A steep trend counts as noise."""
        losses = list(self._losses)
        newest = losses[-MIN_SPIKE_WINDOW:]
        if len(newest) < MIN_SPIKE_WINDOW or loss <= max(newest):
            return False
        self._trend = median_low(losses[len(losses) // 2 :])
        steps = [b - a for a, b in pairwise(losses)]
        self._spread = max(deviation(losses, self._trend), deviation(steps, 0.0) / 2**0.5)
        height = max(SPIKE_DEVIATIONS * self._spread, MIN_SPIKE * abs(self._trend))
        return loss > self._trend + height

    def usual_norm(self) -> float | None:
        """Return the recent gradient norm, None while it is unknown."""
        return median_low(self._norms) if len(self._norms) >= MIN_SPIKE_WINDOW else None

    def is_steep(self, grad_norm: float | None) -> bool:
        """Return whether a gradient norm is far above the recent ones too."""
        usual = self.usual_norm()
        if usual is None or grad_norm is None:
            return False
        reach = SPIKE_DEVIATIONS * deviation(self._norms, usual)
        return grad_norm > max(usual + reach, 2 * usual)
