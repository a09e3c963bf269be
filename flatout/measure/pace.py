"""When a trial has warmed up, and when it has been measured long enough."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from flatout.run import Run
from flatout.training.clocks import Spent
from flatout.training.metrics import Log

BLOCK = 4
"""Steps whose median is compared with that of as many before."""
MOST_WARMUP_STEPS = 100
STILL = 0.02
"""A step time that falls by less than this from one block to the next has settled."""
FEWEST_STEPS = 3
"""Steps that a measurement takes at least."""


def settled(step_s: Sequence[float]) -> bool:
    """Say whether the step time has stopped falling: the warm-up is over.

    The first step never counts: it compiles, allocates and opens. After it, the median of the last four steps is compared with
    that of the four before. It has settled when it is not lower by more than 2%, or by more than what medians of so noisy steps
    differ anyway (their standard error, from the median absolute deviation inside the blocks).
    """
    if len(step_s) < 1 + 2 * BLOCK:
        return False
    before, last = step_s[-2 * BLOCK : -BLOCK], step_s[-BLOCK:]
    centre_before, centre_last = statistics.median(before), statistics.median(last)
    residuals = [abs(s - centre_before) for s in before] + [abs(s - centre_last) for s in last]
    sigma = 1.4826 * statistics.median(residuals)
    standard_error = 1.2533 * sigma * (2 / BLOCK) ** 0.5
    return bool(centre_before - centre_last <= max(STILL * centre_last, standard_error))


class Pace:
    """Stands where a run asks whether to stop: finds the end of the warm-up, then lets `seconds` of steps be measured.

    While it warms up, every step is waited for, so that its time is its own; the steps that are measured are queued as in any
    run, and waited for once, at the end. Warming up ends at the latest after 100 steps, `warmup_s` seconds or half of `limit_s`. A trial goes on
    until it has also taken `loss_steps` steps, or until `limit_s` after its first: it then makes do with three measured steps, and
    after twice as long with one.
    """

    def __init__(
        self, log: Log, *, seconds: float, loss_steps: int, warmup_s: float, limit_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.warmup_steps: int | None = None
        """Steps before the measured ones; None while warming up."""
        self.measured = Spent()
        """Where the time of the measured steps went."""
        self._log, self._clock = log, clock
        self._seconds, self._loss_steps, self._warmup_s, self._limit_s = seconds, loss_steps, warmup_s, limit_s
        self._step_s: list[float] = []
        self._began_s = self._last_s = 0.0
        self._before = Spent()

    def asked(self, run: Run) -> bool:
        """Say whether the trial is over. The loop calls it before each step."""
        if self.warmup_steps is None:
            self._warm_up(run)
            return False
        now_s = self._clock()
        enough = now_s - self._last_s >= self._seconds and run.step >= max(self._loss_steps, self.warmup_steps + FEWEST_STEPS)
        late_s, steps = now_s - self._began_s - self._limit_s, run.step - self.warmup_steps
        return enough or (late_s >= 0 and steps >= FEWEST_STEPS) or (late_s >= self._limit_s and steps > 0)

    def finish(self) -> None:
        """Close the measurement; the loop has ended."""
        self.measured = self._log.spent() - self._before

    def _warm_up(self, run: Run) -> None:
        """Take the time of the step before, and begin to measure once there is nothing more to wait for."""
        before = self._log.spent()
        now_s = self._clock()
        if before.steps == 0:
            self._began_s = self._last_s = now_s
            return
        self._step_s.append(now_s - self._last_s)
        self._last_s = now_s
        out_of_patience = before.steps >= MOST_WARMUP_STEPS or now_s - self._began_s >= min(self._warmup_s, self._limit_s / 2)
        if not settled(self._step_s) and not out_of_patience:
            return
        self.warmup_steps = before.steps
        ahead = int(1.5 * self._seconds / max(self._step_s[-1], 1e-6)) + FEWEST_STEPS
        run.feed.prime(min(max(ahead, self._loss_steps), run.last_step))
        self._before = self._log.spent()
        self._last_s = self._clock()
