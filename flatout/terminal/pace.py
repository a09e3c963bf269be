"""How fast a run steps of late, and how long the rest takes at that pace."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

RECORDS = 5
"""Newest records of metrics.jsonl whose median is the pace."""
FIRST_LOOK_S = 1.0
"""The clock must have run this long before the pace is taken from it."""


class Rates(NamedTuple):
    """What a run gets through in a second of training."""

    steps_per_s: float
    tokens_per_s: float


class Pace:
    """The pace of one process's steps: compiling, the first step and whatever happens between steps
    do not count.

    It comes from the run's own records, but for the first, which holds the warm-up; until there is
    a second, from a clock that starts when the first step is over.
    """

    def __init__(self, tokens_per_step: int, clock: Callable[[], float]) -> None:
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._first_tick: tuple[int, float] | None = None
        self._step = 0
        self._has_warmed_up = False
        self._recent: deque[Rates] = deque(maxlen=RECORDS)

    def tick(self, step: int) -> None:
        """Take note that `step` is over."""
        self._step = step
        self._first_tick = self._first_tick or (step, self._clock())

    def record(self, record: Mapping[str, float]) -> None:
        """Take the rates of a line of metrics.jsonl that has them."""
        if not {"perf/steps_per_s", "perf/tokens_per_s"} <= record.keys():
            return
        if self._has_warmed_up:
            self._recent.append(Rates(record["perf/steps_per_s"], record["perf/tokens_per_s"]))
        self._has_warmed_up = True

    @property
    def is_steady(self) -> bool:
        """Whether a record without the warm-up has come."""
        return bool(self._recent)

    def rates(self) -> Rates | None:
        """Return the present pace, None while it is unknown."""
        if self._recent:
            return Rates(*map(statistics.median, zip(*self._recent, strict=True)))
        if self._first_tick is None:
            return None
        step, began_s = self._first_tick
        seconds = self._clock() - began_s
        if seconds < FIRST_LOOK_S or self._step == step:
            return None
        steps_per_s = (self._step - step) / seconds
        return Rates(steps_per_s, steps_per_s * self._tokens_per_step)
