"""Decides when a trial has warmed up, and when it has been measured long enough."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from flatout.assembly.run import Run
from flatout.training.metrics.clocks import TimeBreakdown
from flatout.training.metrics.log import Log

WINDOW_STEPS, WINDOW_S = 8, 1.0
"""Minimum steps and seconds of a warm-up window."""
TOLERANCE = 0.02
"""Two windows agree if their median steps differ by no more than this share."""
MIN_STEPS = 3
"""Minimum steps of a measurement."""


def is_steady(step_s: Sequence[float]) -> bool:
    """Return whether the step time is steady, so that the warm-up is over.

    The first step never counts: it compiles, allocates and opens files. After it, the medians of
    the last window and of the one before it must agree within 2%. A window is the shortest run of
    at least eight steps and at least a second, so that neither a few quick steps nor a process that
    is still getting faster counts as steady.
    """
    last = window_ending(step_s, len(step_s))
    before = window_ending(step_s, len(step_s) - len(last)) if last else ()
    if not before:
        return False
    return abs(
        statistics.median(before) - statistics.median(last)
    ) <= TOLERANCE * statistics.median(last)


def window_ending(step_s: Sequence[float], end: int) -> Sequence[float]:
    """Return the window of steps before `end`, without the first step.

    It is empty when there are too few steps, or they are too short.
    """
    seconds = 0.0
    for start in range(end - 1, 0, -1):
        seconds += step_s[start]
        if end - start >= WINDOW_STEPS and seconds >= WINDOW_S:
            return step_s[start:end]
    return ()


class Pace:
    """Decides when a run stops: detects the end of the warm-up, then allows `seconds` of steps.

    During warm-up it waits for every step, so that each has its own time; measured steps are queued
    as in any run, and it waits once, at the end. Warm-up ends at the latest `warmup_s` seconds
    after the first step, or after half of `limit_s` or of the run's steps; `is_steady` tells
    whether it ended because the step time was steady. A trial also continues until it has taken
    `loss_steps` steps. After `limit_s`, counted from its first step, three measured steps are
    enough, and after twice that time, one is.
    """

    def __init__(
        self,
        log: Log,
        *,
        seconds: float,
        loss_steps: int,
        warmup_s: float,
        limit_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.warmup_steps: int | None = None
        """Steps before the measured ones; None while warming up."""
        self.warmup_s = 0.0
        """Seconds that they took."""
        self.is_steady = False
        """Whether the step time was steady by then."""
        self.measured = TimeBreakdown()
        """The time of the measured steps, by activity."""
        self.losses: list[Tensor] = []
        """Losses of the first `loss_steps` steps, on the device, so that nothing waits for them."""
        self._log, self._clock = log, clock
        self._seconds, self._loss_steps, self._max_warmup_s, self._limit_s = (
            seconds,
            loss_steps,
            warmup_s,
            limit_s,
        )
        self._step_s: list[float] = []
        self._start_s = self._last_s = 0.0
        self._before = TimeBreakdown()

    def requested(self, run: Run) -> bool:
        """Return whether the trial is over; the loop calls it before each step."""
        if self._log.last_result and len(self.losses) < self._loss_steps:
            self.losses.append(self._log.last_result.loss)
        if self.warmup_steps is None:
            self._warm_up(run)
            return False
        now_s = self._clock()
        enough = now_s - self._last_s >= self._seconds and run.step >= max(
            self._loss_steps, self.warmup_steps + MIN_STEPS
        )
        late_s, steps = now_s - self._start_s - self._limit_s, run.step - self.warmup_steps
        return (
            enough
            or (late_s >= 0 and steps >= MIN_STEPS)
            or (late_s >= self._limit_s and steps > 0)
        )

    def finish(self) -> None:
        """Close the measurement after the loop has ended."""
        self.measured = self._log.time_breakdown() - self._before

    def _warm_up(self, run: Run) -> None:
        """Record the time of the previous step, and start measuring once the warm-up is over."""
        before = self._log.time_breakdown()
        now_s = self._clock()
        if before.steps == 0:
            self._start_s = self._last_s = now_s
            return
        self._step_s.append(now_s - self._last_s)
        self.warmup_s = now_s - self._start_s
        self.is_steady = is_steady(self._step_s)
        is_late = (
            self.warmup_s - self._step_s[0] >= self._max_warmup_s
            or self.warmup_s >= self._limit_s / 2
        )
        if not self.is_steady and not is_late and before.steps < run.last_step // 2:
            self._last_s = self._clock()  # excludes the time of this check
            return
        self.warmup_steps = before.steps
        ahead = int(1.5 * self._seconds / max(self._step_s[-1], 1e-6)) + MIN_STEPS
        run.feed.prime(min(max(ahead, self._loss_steps), run.last_step))
        self._before = self._log.time_breakdown()
        self._last_s = self._clock()
