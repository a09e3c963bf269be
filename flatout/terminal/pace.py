"""The recent rate of a run's steps, from which the time left is estimated."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

RECORDS = 5
"""The rate is the median of this many latest records of metrics.jsonl."""
MIN_CLOCK_S = 1.0
"""Minimum time before the rate is taken from the clock."""


class Rates(NamedTuple):
    """Steps and tokens per second of training."""

    steps_per_s: float
    tokens_per_s: float


class Pace:
    """The rate of one process's steps, excluding compilation, the first step and other work.

    It comes from the run's records, except the first one, which includes the warm-up. Until the
    second record it comes from a clock that starts after the first step.
    """

    def __init__(self, tokens_per_step: int, clock: Callable[[], float]) -> None:
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._first_tick: tuple[int, float] | None = None
        self._step = 0
        self._has_warmed_up = False
        self._recent: deque[Rates] = deque(maxlen=RECORDS)

    def tick(self, step: int) -> None:
        """Register that `step` has ended."""
        self._step = step
        self._first_tick = self._first_tick or (step, self._clock())

    def record(self, record: Mapping[str, float]) -> None:
        """Register a record of metrics.jsonl, if it has rates."""
        if not {"perf/steps_per_s", "perf/tokens_per_s"} <= record.keys():
            return
        if self._has_warmed_up:
            self._recent.append(Rates(record["perf/steps_per_s"], record["perf/tokens_per_s"]))
        self._has_warmed_up = True

    @property
    def is_steady(self) -> bool:
        """Whether there is a record without the warm-up."""
        return bool(self._recent)

    def rates(self) -> Rates | None:
        """Return the current rates, None while they are unknown."""
        if self._recent:
            return Rates(*map(statistics.median, zip(*self._recent, strict=True)))
        if self._first_tick is None:
            return None
        step, start_s = self._first_tick
        seconds = self._clock() - start_s
        if seconds < MIN_CLOCK_S or self._step == step:
            return None
        steps_per_s = (self._step - step) / seconds
        return Rates(steps_per_s, steps_per_s * self._tokens_per_step)
