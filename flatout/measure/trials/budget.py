"""Divides the available minutes over rounds of trials."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

REPEATS = 5
DEFAULT_SECONDS, MIN_SECONDS, MAX_SECONDS = 5.0, 1.0, 15.0
"""Seconds of measured steps per trial: without a time limit, minimum, maximum."""
START_S = 4.0
"""Approximate time that a process takes before it trains."""
USUAL_OVERHEAD_S = START_S + 3.0
"""Assumed overhead of a trial until one has run: its start, and a short warm-up."""
WARMUP_SHARE, MIN_WARMUP_S, MAX_WARMUP_S = 3.0, 6.0, 20.0
"""Limit of a trial's warm-up: a multiple of its measured time, and its bounds."""
LONGEST_TRIAL_S = 900.0
SAFETY = 1.15
"""A trial is started if this multiple of its previous time still fits."""
SLACK = 1.1
"""Rounds are planned with this factor of spare time."""
CLOSING_S = 1.5
"""Reserved for evaluating and writing the results."""
SHARE = 2.0
"""A trial may train for this multiple of its fair share of the time; most take less."""
MIN_LIMIT_S = 3.0


class Budget:
    """Divides minutes over rounds of trials; without minutes, `repeats` rounds of five seconds.

    With minutes, there are at least two rounds if possible and at most `repeats`; the seconds of a
    trial shrink until they fit, and its overhead is estimated from earlier trials. Points that do
    not fit into a round are dropped from it, starting with the last.
    """

    def __init__(
        self,
        num_points: int,
        *,
        minutes: float | None,
        repeats: int | None,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.repeats = repeats or REPEATS
        """Maximum number of rounds."""
        self._clock = clock
        self._num_points = num_points
        self._total_s = math.inf if minutes is None else 60 * minutes
        self._began_s = clock() if began_s is None else began_s
        self._overheads: dict[str, float] = {}
        self.seconds = DEFAULT_SECONDS
        """Seconds of measured steps per trial of this round."""
        self.plan(rounds_done=0)

    @property
    def extras_from(self) -> int:
        """The first round of the extras: with a time limit, after two rounds of everything else."""
        return 0 if math.isinf(self._total_s) else min(2, self.repeats - 1)

    @property
    def warmup_s(self) -> float:
        """Latest end of the warm-up of a trial of this round."""
        return min(max(WARMUP_SHARE * self.seconds, MIN_WARMUP_S), MAX_WARMUP_S)

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self._total_s - CLOSING_S - (self._clock() - self._began_s)

    def plan(self, rounds_done: int) -> None:
        """Choose the seconds of the next round's trials.

        They allow as many rounds as possible with enough time per trial, but at least two in total.
        """
        if math.isinf(self._total_s) or not self._num_points:  # every point may have failed
            return
        overhead_s = (
            sum(self._overheads.values())
            + (self._num_points - len(self._overheads)) * self._usual_overhead()
        )
        wanted = self.repeats - rounds_done
        minimum = max(1, min(2 - rounds_done, wanted))
        for rounds in range(max(wanted, 1), 0, -1):
            seconds = (self.left_s / (SLACK * rounds) - overhead_s) / self._num_points
            if seconds >= 2 * MIN_SECONDS or rounds <= minimum:
                break
        self.seconds = max(
            MIN_SECONDS, min(seconds, MAX_SECONDS if rounds == wanted else DEFAULT_SECONDS)
        )

    def fits(self, names: Sequence[str]) -> list[str]:
        """Return the names that fit into a round that starts now, in order of priority."""
        left_s, fitting = self.left_s, []
        for name in names:
            cost_s = self.expected_s(name)
            if cost_s <= left_s:
                left_s -= cost_s
                fitting.append(name)
        return fitting

    def allows(self, *names: str, reserve_s: float = 0.0) -> bool:
        """Return whether there is time for a trial of each name, and `reserve_s` after them."""
        return SAFETY * sum(map(self.expected_s, names)) + reserve_s <= self.left_s

    def expected_s(self, name: str) -> float:
        """Return the expected time of a trial of `name`, from earlier trials."""
        return self._overheads.get(name, self._usual_overhead()) + self.seconds

    def timeout_s(self, name: str) -> float:
        """Return the seconds after which a trial is killed, at most the time left.

        It may take a quarter of the total, or more if it is expected to be slow; half of it before
        anything has been measured.
        """
        if math.isinf(self._total_s):
            return LONGEST_TRIAL_S
        share = 1 / 4 if self._overheads else 1 / 2
        limit_s = max(share * self._total_s, 3 * self.expected_s(name))
        return max(min(limit_s, self.left_s), 1.0)

    def limit_s(self, trials_left: int) -> float:
        """Return the seconds by which a trial must end its steps, with `trials_left` to come."""
        if math.isinf(self._total_s):
            return LONGEST_TRIAL_S / 3
        return max(min(SHARE / max(trials_left, 1), 1.0) * self.left_s - START_S, MIN_LIMIT_S)

    def remaining_s(self, names: Sequence[str], rounds_after: int) -> float:
        """Return the time left: for `names` and `rounds_after` more rounds, or until the limit."""
        return min(sum(map(self.expected_s, names)) * (1 + rounds_after), self.left_s)

    def record(self, name: str, trial_s: float) -> None:
        """Record the overhead of a trial that took `trial_s` in total."""
        self._overheads[name] = max(trial_s - self.seconds, 0.0)

    def drop(self, name: str) -> None:
        """Plan without `name` from now on."""
        self._overheads.pop(name, None)
        self._num_points -= 1

    def _usual_overhead(self) -> float:
        return statistics.median(self._overheads.values()) if self._overheads else USUAL_OVERHEAD_S
