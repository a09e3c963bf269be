"""How many seconds each measurement may take, so that the whole stays within the minutes that were
given.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

REPEATS = 5
DEFAULT_SECONDS, FEWEST_SECONDS, MOST_SECONDS = 5.0, 1.0, 15.0
"""How long steps are measured in one trial: without a limit of time, at least, at most."""
START_S = 4.0
"""What a process needs before it trains, about."""
USUAL_OVERHEAD_S = START_S + 3.0
"""What a trial is assumed to need besides, until one has been seen: its start, and a warm-up of two
seconds and a few steps.
"""
WARMUP_SHARE, FEWEST_WARMUP_S, MOST_WARMUP_S = 3.0, 6.0, 20.0
"""How long a trial may warm up: so many times what it measures, at least, at most."""
LONGEST_TRIAL_S = 900.0
SAFETY = 1.15
"""A trial is begun when this many times what it took before still fits."""
SLACK = 1.1
"""Rounds are planned to take this much less than there is."""
CLOSING_S = 1.5
"""Kept for judging and writing."""
SHARE = 2.0
"""How many times its fair share of the minutes a trial may train; most take less."""
SHORTEST_LIMIT_S = 3.0


class Budget:
    """Minutes shared out over rounds of trials. Without minutes, `repeats` rounds of five seconds
    each.

    With minutes, at least two rounds are wanted and at most `repeats`; the seconds of a trial
    shrink until they fit, and what a trial needs besides is learnt from those before it. What does
    not fit into a round is left out of it, from the end.
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
        """Rounds at most."""
        self._clock = clock
        self._num_points = num_points
        self._total_s = math.inf if minutes is None else 60 * minutes
        self._began_s = clock() if began_s is None else began_s
        self._overheads: dict[str, float] = {}
        self.seconds = DEFAULT_SECONDS
        """How long the steps of a trial are measured in this round."""
        self.plan(rounds_done=0)

    @property
    def extras_from(self) -> int:
        """The round from which what is measured last takes part: with little time, after two rounds
        of everything else.
        """
        return 0 if math.isinf(self._total_s) else min(2, self.repeats - 1)

    @property
    def warmup_s(self) -> float:
        """When a trial of this round ends its warm-up at the latest."""
        return min(max(WARMUP_SHARE * self.seconds, FEWEST_WARMUP_S), MOST_WARMUP_S)

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self._total_s - CLOSING_S - (self._clock() - self._began_s)

    def plan(self, rounds_done: int) -> None:
        """Choose the seconds of the next round's trials: as many rounds as leave enough for each,
        two in all if it must be.
        """
        if math.isinf(self._total_s):
            return
        overhead_s = (
            sum(self._overheads.values())
            + (self._num_points - len(self._overheads)) * self._usual_overhead()
        )
        wanted = self.repeats - rounds_done
        fewest = max(1, min(2 - rounds_done, wanted))
        for rounds in range(max(wanted, 1), 0, -1):
            seconds = (self.left_s / (SLACK * rounds) - overhead_s) / self._num_points
            if seconds >= 2 * FEWEST_SECONDS or rounds <= fewest:
                break
        self.seconds = max(
            FEWEST_SECONDS, min(seconds, MOST_SECONDS if rounds == wanted else DEFAULT_SECONDS)
        )

    def fits(self, names: Sequence[str]) -> list[str]:
        """Return those that fit into a round that begins now, the first ones first."""
        left_s, fitting = self.left_s, []
        for name in names:
            cost_s = self.expected_s(name)
            if cost_s <= left_s:
                left_s -= cost_s
                fitting.append(name)
        return fitting

    def allows(self, name: str) -> bool:
        """Say whether there is time for one more trial of `name`."""
        return SAFETY * self.expected_s(name) <= self.left_s

    def expected_s(self, name: str) -> float:
        """Return what a trial of `name` will take, as far as the trials before tell."""
        return self._overheads.get(name, self._usual_overhead()) + self.seconds

    def timeout_s(self, name: str) -> float:
        """Return when a trial is killed: an unknown one may take a quarter of the minutes, none
        more than is left.
        """
        if math.isinf(self._total_s):
            return LONGEST_TRIAL_S
        patience_s = max(self._total_s / 4, 3 * self.expected_s(name))
        return max(min(patience_s, self.left_s), 1.0)

    def limit_s(self, trials_left: int) -> float:
        """Return when a trial ends its steps although it lacks losses or seconds, so that
        `trials_left` more find time too.
        """
        if math.isinf(self._total_s):
            return LONGEST_TRIAL_S / 3
        return max(min(SHARE / max(trials_left, 1), 1.0) * self.left_s - START_S, SHORTEST_LIMIT_S)

    def remaining_s(self, names: Sequence[str], rounds_after: int) -> float:
        """Return what is left: the trials of `names` and as many rounds of the same after them, or
        the minutes if they end before.
        """
        return min(sum(map(self.expected_s, names)) * (1 + rounds_after), self.left_s)

    def record(self, name: str, trial_s: float) -> None:
        """Learn from a trial that took `trial_s` in all."""
        self._overheads[name] = max(trial_s - self.seconds, 0.0)

    def drop(self, name: str) -> None:
        """Plan without `name` from now on: it is not measured again."""
        self._overheads.pop(name, None)
        self._num_points -= 1

    def _usual_overhead(self) -> float:
        return statistics.median(self._overheads.values()) if self._overheads else USUAL_OVERHEAD_S
