"""Finds the fastest setting by a race: of a recipe, or of a script whose changes were screened.

Every move of a recipe is measured once beside the start, which only orders them. Those that look
faster are measured again in turns, the best first, each on top of those before it, and is taken if
its whole interval is a gain and the losses agree. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flatout.measure.intervals import LEAST_GAIN, ROUNDS, Figure
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
    """The ratio of its first trial to the one beside it."""
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
    last_trials: int = 4
    """Trials for which the time is kept after the search, where something was taken."""
    tried: dict[str, Tried] = field(default_factory=dict)
    """What was measured of each move, by its name."""
    taken: list[Tried] = field(default_factory=list)
    """The moves that lead from the start to `best`, in this order."""
    left: list[Row] = field(default_factory=list)
    """What was not measured, and why."""

    @property
    def best(self) -> Setting:
        """The fastest setting so far."""
        return self.taken[-1].after if self.taken else self.start

    def leave(self, name: str, why: str) -> None:
        """Note that something is not measured."""
        self.left.append(absent_row(name, why))

    def run(self) -> None:
        """Search until every move is decided, or the time is up."""
        race, late, ranked = self.race, self.screen(), list[tuple[float, Tried]]()
        for one in self.tried.values():
            gain = one.first_gain or 0.0
            if one.move.leaves_out and race.results(one.after):  # what it removes may be wrong
                check = race.check(one.after, one.before)
                gain = math.inf if check.within_tolerance is False else gain
            ranked += [(gain, one)] if gain >= PROMISING else []
        for _, one in sorted(ranked, key=lambda each: -each[0]):
            after = one.move.apply(self.best)
            if after and after != self.best and race.ended_by_signal is None:
                self.attempt(one.move, after)
        for move in late:
            why = f"not measured: {race.stopped_by}."
            self.leave(move.name, NO_TIME if race.ended_by_signal is None else why)

    def screen(self) -> list[Move]:
        """Measure every move once, two at a time between trials of the start.

        Returns the moves for which there was no time.
        """
        race, waiting = self.race, dict[Setting, Move]()
        for move in self.moves:
            if (after := move.apply(self.start)) is not None:
                waiting.setdefault(after, move)
        base = race.results(self.start)[-1]
        with suppress(TimeIsUp):
            while waiting:
                # while none is promising, there is nothing else to keep time for
                is_any = any((one.first_gain or 0.0) >= PROMISING for one in self.tried.values())
                if not race.allows(self.start, share=SCREEN_SHARE if is_any else 1.0):
                    break
                after, move = next(iter(waiting.items()))
                if why := self.why_not(after):
                    self.leave(move.name, why)
                    del waiting[after]
                    continue
                result = race.run(after)
                one = self.record(waiting.pop(after), after)
                if result.is_ok:
                    one.first_gain = race.ratio(result, base)
                else:
                    one.reason = f"failed: {result.reason}"
                if len(self.tried) % 2 == 0 and waiting:
                    again = race.run(self.start)
                    base = again if again.is_ok else base
        return [*waiting.values()]

    def record(self, move: Move, after: Setting) -> Tried:
        """Return the record of a move, which is new unless it was screened."""
        one = self.tried.setdefault(move.name, Tried(move, self.best, after))
        one.before, one.after = self.best, after
        return one

    def attempt(self, move: Move, after: Setting, before: Setting | None = None) -> bool:
        """Race a move on top of the best setting or another, and return whether it was taken."""
        race, one = self.race, self.record(move, after)
        one.before = before = before or self.best
        if not race.allows(before, after, *[after] * (self.last_trials if self.taken else 0)):
            one.reason = f"{UNPROVEN}: {race.stopped_by} before it was repeated"
            if one.first_gain is None:
                del self.tried[move.name]
                self.leave(move.name, NO_TIME)
            return False
        one.reason = self.prove(after, before, move, reserve=self.last_trials // 2)
        one.is_raced = race.gain(after, before) is not None
        if not race.results(after) and not race.failure(after):
            del self.tried[move.name]
        one.taken = one.reason is None
        self.taken += [one] * one.taken
        return one.taken

    def prove(
        self,
        after: Setting,
        before: Setting,
        move: Move | None = None,
        *,
        rounds: int = ROUNDS,
        reserve: int = 0,
    ) -> str | None:
        """Race two settings, and return why the first one is not proven better. None: it is.

        Its losses differ, or its gain is not clear.
        """
        race = self.race
        why = race.compare(after, before, rounds=rounds, reserve=reserve)
        gain = race.gain(after, before)
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
                **({"against": self.race.name(one.before)} if one.is_raced else one.seen),
            )
            for one in self.tried.values()
        ]


def unclear(gain: Figure) -> str | None:
    """Return why an interval does not show that something is faster. None: it does."""
    if (gain.low or 0.0) > LEAST_GAIN:
        return None
    is_open = gain.median >= LEAST_GAIN and (gain.high or math.inf) > LEAST_GAIN
    return UNPROVEN if is_open else "no clear gain"
