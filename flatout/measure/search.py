"""Finds the fastest setting by a race: of a recipe, or of a script whose changes were screened.

Every move of a recipe is measured once beside the start, which only orders them. Those that look
faster are measured again in turns, the best first, each on top of those before it, and is taken if
its whole interval is a gain and the losses agree. No torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.measure.intervals import LEAST_GAIN, Figure
from flatout.measure.moves import Move, Setting
from flatout.measure.race import Race, Row, TimeIsUp, absent_row

PROMISING = 1.005
"""Lower gains of a first trial are not repeated."""
SCREEN_SHARE = 0.5
"""Share of the time after which no further move is measured first."""
NO_TIME = "not measured: the time was up before its turn."
UNPROVEN = "not proven"
"""Starts the reason of a change that was faster, and not often enough to be sure."""
DIFFERENT = "its losses exceed the tolerance"
UNSEEN = "no loss was seen: no backward pass starts at a single number"


@dataclass(eq=False)
class Tried:
    """A move that was measured."""

    move: Move
    before: Setting
    after: Setting
    first_gain: float | None = None
    """The ratio of its first trial to those beside it."""
    seen: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its row that are known from its screening."""
    is_raced: bool = False
    """Whether it was measured again, in turns with `before`."""
    taken: bool = False
    reason: str | None = None
    """Why it was not taken."""


@dataclass
class Search:
    """A search from a start, whose results so far are there at any time."""

    race: Race
    start: Setting
    moves: Sequence[Move] = ()
    """Those to measure from the start, the most promising ones first."""
    why_not: Callable[[Setting], str | None] = lambda after: None
    """Returns why a setting is not worth a measurement. None: it is."""
    start_name: str = "auto"
    last_trials: int = 4
    """Trials for which the time is kept after the search, where something was taken."""
    always_trials: int = 0
    """Trials for which the time is kept in any case."""
    tried: list[Tried] = field(default_factory=list)
    taken: list[Tried] = field(default_factory=list)
    """The moves that lead from the start to `best`, in this order."""
    left: list[Row] = field(default_factory=list)
    """What was not measured, and why."""

    @property
    def best(self) -> Setting:
        """The fastest setting so far."""
        return self.taken[-1].after if self.taken else self.start

    def name(self, setting: Setting) -> str:
        """Return the name of a setting: how it differs from the one that has a name."""
        return setting.beyond(self.start) or self.start_name

    def leave(self, name: str, why: str) -> None:
        """Note that something is not measured."""
        self.left.append(absent_row(name, why))

    def run(self) -> None:
        """Search until every move is decided, or the time is up."""
        race, late = self.race, self.screen()
        wrong = {id(one) for one in self.tried if one.move.leaves_out and race.results(one.after)
                 and race.check(one.after, one.before).within_tolerance is False}  # fmt: skip
        first = [one for one in self.tried
                 if id(one) in wrong or (one.first_gain or 0.0) >= PROMISING]  # fmt: skip
        first.sort(key=lambda one: (id(one) not in wrong, -(one.first_gain or 0.0)))
        queue = [one.move for one in first]
        while queue and race.ended_by_signal is None:
            move = queue.pop(0)
            after = move.apply(self.best)
            if after is None or after == self.best:
                continue
            if self.attempt(move, after):
                following = move.then and move.then.apply(self.best)
                if move.then and following and self.why_not(following) is None:
                    queue.insert(0, move.then)
        why = NO_TIME if race.ended_by_signal is None else f"not measured: {race.stopped_by}."
        for move in late:
            self.leave(move.name, why)

    def screen(self) -> list[Move]:
        """Measure every move once, two at a time between trials of the start.

        Returns the moves for which there was no time.
        """
        race, waiting = self.race, dict[Setting, Move]()
        for move in self.moves:
            after = move.apply(self.start)
            if after is not None:
                waiting.setdefault(after, move)
        bases, ok = [race.results(self.start)[-1]], list[Tried]()
        try:
            while waiting and self._has_time():
                after, move = next(iter(waiting.items()))
                why_not = self.why_not(after)
                if why_not is not None:
                    self.leave(move.name, why_not)
                    del waiting[after]
                    continue
                race.note(f"{self.name(after)}{f': {move.does}' if move.does else ''}")
                result = race.run(after)
                one = self.record(move, after)
                del waiting[after]
                if not result.is_ok:
                    one.reason = f"failed: {result.reason}"
                    continue
                ok.append(one)
                one.first_gain = race.ratio(result, bases[-1])
                if len(ok) % 2 == 0 or not waiting:
                    base = race.run(self.start)
                    bases.append(base if base.is_ok else bases[-1])
        except TimeIsUp:
            pass
        for number, one in enumerate(ok):
            result = race.results(one.after)[0]
            around = bases[number // 2 : number // 2 + 2]
            one.first_gain = statistics.fmean(race.ratio(result, base) for base in around)
        return [*waiting.values()]

    def _has_time(self) -> bool:
        """Return whether there is time to measure a further move first.

        While none is promising, there is nothing else to keep time for.
        """
        has_promising = any((one.first_gain or 0.0) >= PROMISING for one in self.tried)
        kept = [self.start] * (1 + self.always_trials)
        return self.race.allows(*kept, share=SCREEN_SHARE if has_promising else 1.0)

    def record(self, move: Move, after: Setting) -> Tried:
        """Return the record of a move, which is new unless it was screened."""
        one = next((each for each in self.tried if each.move.name == move.name), None)
        if one is None:
            one = Tried(move, self.best, after)
            self.tried.append(one)
        one.before, one.after = self.best, after
        return one

    def attempt(self, move: Move, after: Setting, before: Setting | None = None) -> bool:
        """Race a move on top of the best setting or another, and return whether it was taken."""
        race, best = self.race, before or self.best
        kept = max(self.last_trials, self.always_trials) if self.taken else self.always_trials
        one = self.record(move, after)
        one.before = best
        if not race.allows(best, after, *[after] * kept):
            one.reason = f"{UNPROVEN}: {race.stopped_by} before it was repeated"
            if one.first_gain is None:
                self.tried.remove(one)
                self.leave(move.name, NO_TIME)
            return False
        race.note(f"{self.name(after)} beside {self.name(best)}")
        one.reason = self.prove(one.after, one.before, move, reserve=self.last_trials // 2)
        one.is_raced = race.gain(after, best) is not None
        if not race.results(after) and not race.failure(after):
            self.tried.remove(one)
        one.taken = one.reason is None
        self.taken += [one] * one.taken
        return one.taken

    def prove(
        self, after: Setting, before: Setting, move: Move | None = None, *, reserve: int = 0
    ) -> str | None:
        """Race two settings, and return why the first one is not proven better. None: it is.

        Its losses differ, or its gain is not clear.
        """
        race = self.race
        why, gain = race.compare(after, before, reserve=reserve), race.gain(after, before)
        if why is not None:
            return why if race.failure(after) else f"{UNPROVEN}: {why}"
        check = race.check(after, before)
        if check.within_tolerance is False:  # what a move removes may be what is wrong
            return None if move and move.leaves_out else DIFFERENT
        if check.loss_difference is None:
            return UNSEEN
        if check.within_tolerance is None and check.tolerance == "statistical":
            return f"{UNPROVEN}: {check.tolerance_reason}"
        return unclear(gain) if gain else None

    def give_up(self, one: Tried, reason: str) -> None:
        """Give up a move that was taken, and keep the others."""
        rest = [other for other in self.taken if other is not one]
        one.taken, one.reason, self.taken = False, reason, []
        for other in rest:
            other.before, other.after = self.best, other.move.apply(self.best) or self.best
            self.taken.append(other)

    def rows(self) -> list[Row]:
        """Return what was measured about every move."""
        return [
            self.race.row(
                one.after,
                one.before,
                name=one.move.name,
                does=one.move.does,
                speedup=one.move.speedup,
                leaves_out=one.move.leaves_out,
                first_gain=one.first_gain,
                taken=one.taken,
                reason=one.reason,
                **({"against": self.name(one.before)} if one.is_raced else one.seen),
            )
            for one in self.tried
        ]


def unclear(gain: Figure) -> str | None:
    """Return why an interval does not show that something is faster. None: it does."""
    if (gain.low or 0.0) > LEAST_GAIN:
        return None
    is_open = gain.median >= LEAST_GAIN and (gain.high or math.inf) > LEAST_GAIN
    return UNPROVEN if is_open else "no clear gain"
