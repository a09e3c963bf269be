"""When a trial has warmed up, and when it has been measured long enough."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from flatout.assembly.run import Run
from flatout.training.metrics.clocks import TimeBreakdown
from flatout.training.metrics.log import Log

WINDOW_STEPS, WINDOW_S = 8, 1.0
"""A window of warm-up holds so many steps at least, and so many seconds."""
STILL = 0.02
"""Two windows whose median steps differ by less than this share agree."""
FEWEST_STEPS = 3
"""Steps that a measurement takes at least."""


def settled(step_s: Sequence[float]) -> bool:
    """Say whether the step time stands still: the warm-up is over.

    The first step never counts: it compiles, allocates and opens. After it, the medians of the last
    window and of the one before it must agree within 2%. A window is the fewest steps that are at
    least eight and take at least a second, so that neither a few quick steps nor a process that is
    still speeding up pass for steady.
    """
    last = window_ending(step_s, len(step_s))
    before = window_ending(step_s, len(step_s) - len(last)) if last else ()
    if not before:
        return False
    return abs(statistics.median(before) - statistics.median(last)) <= STILL * statistics.median(
        last
    )


def window_ending(step_s: Sequence[float], end: int) -> Sequence[float]:
    """Return the window of the steps before `end`, the first step left out; an empty one when they
    are too few or too short.
    """
    seconds = 0.0
    for begin in range(end - 1, 0, -1):
        seconds += step_s[begin]
        if end - begin >= WINDOW_STEPS and seconds >= WINDOW_S:
            return step_s[begin:end]
    return ()


class Pace:
    """Stands where a run asks whether to stop: finds the end of the warm-up, then lets `seconds` of
    steps be measured.

    While it warms up, every step is waited for, so that its time is its own; the steps that are
    measured are queued as in any run, and waited for once, at the end. Warming up ends at the
    latest `warmup_s` seconds after the first step, or with half of `limit_s` or of the run's steps;
    `is_settled` says whether it ended by itself. A trial goes on until it has also taken
    `loss_steps` steps, or until `limit_s` after its first: it then makes do with three measured
    steps, and after twice as long with one.
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
        self.is_settled = False
        """Whether the step time stood still by then."""
        self.measured = TimeBreakdown()
        """Where the time of the measured steps went."""
        self._log, self._clock = log, clock
        self._seconds, self._loss_steps, self._most_warmup_s, self._limit_s = (
            seconds,
            loss_steps,
            warmup_s,
            limit_s,
        )
        self._step_s: list[float] = []
        self._began_s = self._last_s = 0.0
        self._before = TimeBreakdown()

    def asked(self, run: Run) -> bool:
        """Say whether the trial is over. The loop calls it before each step."""
        if self.warmup_steps is None:
            self._warm_up(run)
            return False
        now_s = self._clock()
        enough = now_s - self._last_s >= self._seconds and run.step >= max(
            self._loss_steps, self.warmup_steps + FEWEST_STEPS
        )
        late_s, steps = now_s - self._began_s - self._limit_s, run.step - self.warmup_steps
        return (
            enough
            or (late_s >= 0 and steps >= FEWEST_STEPS)
            or (late_s >= self._limit_s and steps > 0)
        )

    def finish(self) -> None:
        """Close the measurement; the loop has ended."""
        self.measured = self._log.time_breakdown() - self._before

    def _warm_up(self, run: Run) -> None:
        """Take the time of the step before, and begin to measure once there is nothing more to wait
        for.
        """
        before = self._log.time_breakdown()
        now_s = self._clock()
        if before.steps == 0:
            self._began_s = self._last_s = now_s
            return
        self._step_s.append(now_s - self._last_s)
        self.warmup_s = now_s - self._began_s
        self.is_settled = settled(self._step_s)
        is_late = (
            self.warmup_s - self._step_s[0] >= self._most_warmup_s
            or self.warmup_s >= self._limit_s / 2
        )
        if not self.is_settled and not is_late and before.steps < run.last_step // 2:
            self._last_s = self._clock()  # looking back over the steps is in no step's time
            return
        self.warmup_steps = before.steps
        ahead = int(1.5 * self._seconds / max(self._step_s[-1], 1e-6)) + FEWEST_STEPS
        run.feed.prime(min(max(ahead, self._loss_steps), run.last_step))
        self._before = self._log.time_breakdown()
        self._last_s = self._clock()
