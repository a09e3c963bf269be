"""Change detection in the figures of a run: a shift that stays, a creep, a spike.

All use medians and ranks, which single outliers do not move, and compare with the noise of the
figure itself. They need constant memory and a few microseconds per value. benchmarks/alarms.py
measures how often they are wrong and how late they are right.
"""

from __future__ import annotations

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
MIN_CONCORDANCE = 0.9
"""Minimum of Kendall's tau of a creep: 4.9 standard deviations for 16 independent values."""
MIN_QUARTER = 0.25
"""Minimum share of the growth in each of the later three quarters; it is 1/3 when it is even."""
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
    """A figure that has left its usual range, or has returned to it."""

    since_step: int
    """Step of the first value of the change."""
    usual: float
    now: float
    is_over: bool = False


class _Point(NamedTuple):
    step: int
    value: float


class _Usual(NamedTuple):
    """The usual level of a figure, and how far it may be from it."""

    level: float
    reach: float


def deviation(values: Iterable[float], center: float) -> float:
    """Return a robust standard deviation about `center`."""
    return DEVIATIONS_PER_MAD * median_low(abs(value - center) for value in values)


class Shift:
    """Detects that a figure rises (`direction` 1) or falls (-1) by more than `margin`, and stays.

    The figure must also leave its noise: three standard deviations of single values, six of the
    recent ones together, which noise that lasts for several values does not exceed either.
    """

    def __init__(self, direction: Literal[-1, 1], margin: float) -> None:
        self._direction = direction
        self._margin = margin
        self._recent: deque[_Point] = deque(maxlen=RECENT)
        self._earlier: deque[float] = deque(maxlen=USUAL)
        self._earlier_together: deque[float] = deque(maxlen=USUAL)
        self._first_level: float | None = None
        self._usual: _Usual | None = None
        self._num_usual = 0
        self.active: Change | None = None
        """The change that has begun and is not over."""

    def see(self, step: int, value: float) -> Change | None:
        """Take the next value; return a change that begins or is over with it."""
        point = _Point(step, value * self._direction)
        if len(self._recent) == RECENT and self.active is None:
            self._learn(self._recent[0].value, self._together())
        self._recent.append(point)
        if self._usual is None or len(self._recent) < RECENT:
            return None
        if self.active is not None:
            return self._end()
        if self._together() <= self._usual.level + self._usual.reach:
            return None
        since = next(p.step for p in self._recent if self._is_outside(p.value))
        self.active = Change(since, *self._levels(since))
        return self.active

    @property
    def is_suspicious(self) -> bool:
        """Whether the last value is outside the usual range."""
        return bool(self._recent) and self._is_outside(self._recent[-1].value)

    def _is_outside(self, value: float) -> bool:
        return self._usual is not None and value > self._usual.level + self._usual.reach

    def _together(self) -> float:
        """Return the value that all recent ones but EXCEPTIONS reach."""
        return sorted(point.value for point in self._recent)[EXCEPTIONS]

    def _levels(self, since: int) -> tuple[float, float]:
        assert self._usual is not None, "there is a change only from a usual level"
        now = median(point.value for point in self._recent if point.step >= since)
        return self._usual.level * self._direction, now * self._direction

    def _learn(self, value: float, together: float) -> None:
        if self._is_outside(value):
            return
        self._earlier.append(value)
        self._earlier_together.append(together)
        self._num_usual += 1
        if len(self._earlier) < MIN_USUAL or (self._usual and self._num_usual % REFRESH):
            return
        level, together_level = median_low(self._earlier), median_low(self._earlier_together)
        is_settled = len(self._earlier) >= SETTLED
        reach = max(
            self._margin,
            (3.0 if is_settled else 4.5) * deviation(self._earlier, level),
            6.0 * deviation(self._earlier_together, together_level),
        )
        if self._first_level is None and is_settled:
            self._first_level = level  # so that a slow drift is a shift too
        if self._first_level is not None:
            level = min(level, self._first_level)
        self._usual = _Usual(level, reach)

    def _end(self) -> Change | None:
        assert self._usual is not None
        assert self.active is not None
        inside = sum(
            point.value <= self._usual.level + self._usual.reach / 2 for point in self._recent
        )
        if inside < RECENT - EXCEPTIONS:
            return None
        since, self.active = self.active.since_step, None
        return Change(since, *self._levels(self._recent[0].step), is_over=True)


class Creep:
    """Detects that memory grows and grows, by `min_growth` GiB and `min_share` of it at least.

    It compares the minima of blocks of values, because peaks come and go. The growth must not level
    off, as that of an allocator's cache does.
    """

    def __init__(self, *, min_growth: float, min_share: float) -> None:
        self._min_growth, self._min_share = min_growth, min_share
        self._left_to_skip = WARM_UP
        self._scales = tuple(_Scale(values) for values in BLOCK_VALUES)
        self._active_scale: _Scale | None = None

    def see(self, step: int, value: float) -> Change | None:
        """Take the next value; return a creep that begins or is over with it."""
        if self._left_to_skip:
            self._left_to_skip -= 1
            return None
        found = None
        for scale in self._scales:
            if scale.add(step, value):
                found = found or self._look(scale)
        return found

    def _look(self, scale: _Scale) -> Change | None:
        growth = scale.growth()
        if growth is None:
            return None
        first, last = scale.minima[0], scale.minima[-1]
        if self._active_scale is None:
            is_large = growth > max(self._min_growth, self._min_share * first.value)
            if not is_large or not is_steady_growth([point.value for point in scale.minima]):
                return None
            self._active_scale = scale
            return Change(first.step, first.value, last.value)
        if scale is not self._active_scale or growth > self._min_growth / 2:
            return None
        self._active_scale = None
        for each in self._scales:  # what has ended must not be found again on a longer scale
            each.minima.clear()
        return Change(first.step, first.value, last.value, is_over=True)


class _Scale:
    """The minima of the last BLOCKS blocks of `num_values` values each."""

    def __init__(self, num_values: int) -> None:
        self._num_values = num_values
        self._seen = 0
        self._lowest: _Point | None = None
        self.minima: deque[_Point] = deque(maxlen=BLOCKS)

    def add(self, step: int, value: float) -> bool:
        """Take a value; return whether it completed a block."""
        if self._lowest is None or value < self._lowest.value:
            self._lowest = _Point(step, value)
        self._seen += 1
        if self._seen < self._num_values:
            return False
        self.minima.append(self._lowest)
        self._seen, self._lowest = 0, None
        return True

    def growth(self) -> float | None:
        """Return the growth over all blocks, None before there are enough."""
        if len(self.minima) < BLOCKS:
            return None
        quarters = _quarters([point.value for point in self.minima])
        return quarters[-1] - quarters[0]


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
        self.active: Change | None = None
        """The spike that has begun and is not over."""

    def see(self, step: int, loss: float, grad_norm: float | None) -> Change | None:
        """Take the next loss; return a spike that begins or is over with it."""
        if self.active is not None:
            return self._end(loss)
        newest = list(self._losses)[-MIN_SPIKE_WINDOW:]
        if len(newest) == MIN_SPIKE_WINDOW and loss > max(newest):
            self._measure()
            height = max(SPIKE_DEVIATIONS * self._spread, MIN_SPIKE * abs(self._trend))
            if loss > self._trend + height:
                self._suspects.append(_Point(step, loss))
                needed = 2 + min(sum(self._odd), 2)
                if len(self._suspects) >= needed or self.is_steep(grad_norm):
                    return self._begin()
                return None
        self._odd.extend(True for _ in self._suspects)
        self._odd.append(False)
        self._suspects.clear()
        self._losses.append(loss)
        if grad_norm is not None:
            self._norms.append(grad_norm)
        return None

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

    def _measure(self) -> None:
        """Measure the trend and its noise; a steep trend counts as noise."""
        losses = list(self._losses)
        self._trend = median_low(losses[len(losses) // 2 :])
        steps = [b - a for a, b in pairwise(losses)]
        self._spread = max(deviation(losses, self._trend), deviation(steps, 0.0) / 2**0.5)

    def _begin(self) -> Change:
        first, self._calm = self._suspects[0], 0
        highest = max(point.value for point in self._suspects)
        self._suspects = []
        self.active = Change(first.step, self._trend, highest)
        return self.active

    def _end(self, loss: float) -> Change | None:
        assert self.active is not None
        height = max(SPIKE_OVER * self._spread, MIN_SPIKE / 2 * abs(self._trend))
        self._calm = self._calm + 1 if loss <= self._trend + height else 0
        if self._calm < 2:
            return None
        since, self.active = self.active.since_step, None
        return Change(since, self._trend, loss, is_over=True)
