"""Finds the fastest setting by a race: of a recipe or of a script, which differ in their moves.

Every move is measured once beside the start, which only orders them. Those that look faster are
measured again in turns, the best first, each on top of those before it, and is taken if its whole
interval is a gain and the losses agree. No torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from flatout.assembly.recipe import Tolerance
from flatout.measure.race import INTERRUPTED, LEAST_GAIN, LossCheck, Race, TimeIsUp
from flatout.measure.results import NO_TIME, UNPROVEN, Left, Row, measured

PROMISING = 1.005
"""Lower gains of a first trial are not repeated."""
SCREEN_SHARE = 0.5
"""Share of the time after which no further move is measured first."""
LATE = "before it was repeated"
"""Follows why a race has ended."""
DIFFERENT = "its losses exceed the tolerance"
UNSEEN = "no loss was seen: no backward pass starts at a single number"
Setting = TypeVar("Setting", bound=Hashable)


class Move(Protocol[Setting]):
    """A change of a setting."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def does(self) -> str:
        """What it does, in a few words."""

    @property
    def speedup(self) -> str | None:
        """The one speedup whose gain it measures, if that is all that it changes."""

    @property
    def is_leaving_out(self) -> bool:
        """Whether it only removes something, which is taken too if that breaks the losses."""

    def apply(self, setting: Setting, /) -> Setting | None:
        """Return the changed setting. None when it cannot be changed so."""


class Space(Protocol[Setting]):
    """Where a search can go from a setting."""

    def moves(self, setting: Setting, /) -> Sequence[Move[Setting]]:
        """Return the moves to measure from the start, the most promising ones first."""

    def why_not(self, after: Setting, race: Race[Setting], /) -> str | None:
        """Return why a setting is not worth a measurement. None: it is."""

    def further(self, before: Setting, after: Setting, /) -> Move[Setting] | None:
        """Return the move in the direction of one that was taken. None: there is none."""

    def tolerance(self, one: Setting, other: Setting, /) -> Tolerance:
        """Return the tolerance between the losses of two settings."""

    def name(self, setting: Setting, /) -> str:
        """Return the name of a setting."""


@dataclass(eq=False)
class Tried(Generic[Setting]):
    """A move that was measured."""

    move: Move[Setting]
    before: Setting
    after: Setting
    row: Row
    """What was found. The search fills it."""


@dataclass
class Search(Generic[Setting]):
    """A search from a start, whose results so far are there at any time."""

    race: Race[Setting]
    space: Space[Setting]
    start: Setting
    loss_steps: int
    draws: str | None = None
    """Why losses cannot be compared step by step. See `Race.check`."""
    is_strict: bool = True
    """Whether losses that differ step by step are wrong. See `Race.check`."""
    last_trials: int = 4
    """Trials for which the time is kept after the search, where something was taken."""
    always_trials: int = 0
    """Trials for which the time is kept in any case."""
    proves_alone: bool = True
    """Whether a single winner is raced here. Otherwise the caller races what it is taken for."""
    tried: list[Tried[Setting]] = field(default_factory=list)
    taken: list[Tried[Setting]] = field(default_factory=list)
    """The moves that lead from the start to `best`, in this order."""
    left: list[Left] = field(default_factory=list)
    """What was not measured, and why."""

    @property
    def best(self) -> Setting:
        """The fastest setting so far."""
        return self.taken[-1].after if self.taken else self.start

    def run(self) -> None:
        """Search until every move is decided, or the time is up."""
        race, late = self.race, self.screen()
        ranks = {
            one: (not self._breaks_losses(one), -(one.row.first_gain or 0.0)) for one in self.tried
        }
        first = [one for one in sorted(ranks, key=ranks.__getitem__)
                 if ranks[one] <= (True, -PROMISING)]  # fmt: skip
        queue = [one.move for one in first] + late
        while queue and race.ended_by_signal is None:
            move = queue.pop(0)
            after = move.apply(self.best)
            if after is None or after == self.best:
                continue
            is_last = not queue or not race.allows(*[self.best] * (self.last_trials + 4))
            is_alone = is_last and not self.taken and not self.proves_alone
            if is_alone and race.results(after):  # taken as it is: nothing is measured on top of it
                self._check(one := self._tried(move, after))
                if one.row.taken:
                    self.taken.append(one)
                if one.row.taken or one.row.within_tolerance is False:
                    return
            if not self._try(move, after, is_late=move in late):
                continue
            further = self.space.further(self.taken[-1].before, self.taken[-1].after)
            ahead = further.apply(self.best) if further else None
            if further and ahead and self.space.why_not(ahead, race) is None:
                queue.insert(0, further)
        known = {one.move.name for one in self.tried}
        why = NO_TIME if race.ended_by_signal is None else f"not measured: {INTERRUPTED}."
        self.left += [Left(name=m.name, reason=why) for m in late if m.name not in known]

    def screen(self) -> list[Move[Setting]]:
        """Measure every move once, two at a time between trials of the start.

        Returns the moves for which there was no time.
        """
        race = self.race
        waiting: dict[Setting, Move[Setting]] = {}
        for move in self.space.moves(self.start):
            after = move.apply(self.start)
            if after is not None:
                waiting.setdefault(after, move)
        bases, ok = [race.results(self.start)[-1]], list[Tried[Setting]]()
        try:
            while waiting and self._goes_on():
                after, move = next(iter(waiting.items()))
                if why_not := self.space.why_not(after, race):
                    self.left.append(Left(name=move.name, reason=why_not))
                    del waiting[after]
                    continue
                race.note(f"{self.space.name(after)}{f': {move.does}' if move.does else ''}")
                result = race.run(after)
                one = self._tried(move, after)
                del waiting[after]
                if not result.is_ok:
                    one.row.status, one.row.reason = result.status, f"failed: {result.reason}"
                    continue
                ok.append(one)
                one.row.first_gain = race.ratio(result, bases[-1])
                if len(ok) % 2 == 0 or not waiting:
                    base = race.run(self.start)
                    bases.append(base if base.is_ok else bases[-1])
        except TimeIsUp:
            pass
        for number, one in enumerate(ok):
            result = race.results(one.after)[0]
            around = bases[number // 2 : number // 2 + 2]
            one.row.first_gain = statistics.fmean(race.ratio(result, base) for base in around)
        return [*waiting.values()]

    def _goes_on(self) -> bool:
        """Return whether there is time to measure a further move first.

        While none is promising, there is nothing else to keep time for.
        """
        has_promising = any((one.row.first_gain or 0.0) >= PROMISING for one in self.tried)
        kept = [self.start] * (1 + self.always_trials)
        return self.race.allows(*kept, share=SCREEN_SHARE if has_promising else 1.0)

    def _tried(self, move: Move[Setting], after: Setting) -> Tried[Setting]:
        """Return the record of a move, which is new unless it was screened."""
        one = next((each for each in self.tried if each.move.name == move.name), None)
        if one is None:
            row = Row(name=move.name, does=move.does, speedup=move.speedup)
            row.leaves_out = move.is_leaving_out
            one = Tried(move, self.best, after, row)
            self.tried.append(one)
        one.before, one.after = self.best, after
        return one

    def _breaks_losses(self, one: Tried[Setting]) -> bool:
        """Return whether what a move removes breaks the losses, which takes it, however slow."""
        if not one.move.is_leaving_out or not self.race.results(one.after):
            return False
        return self._losses(one).within_tolerance is False

    def _losses(self, one: Tried[Setting]) -> LossCheck:
        return self.race.check(
            one.after,
            one.before,
            self.space.tolerance(one.after, one.before),
            loss_steps=self.loss_steps,
            draws=self.draws,
            is_strict=self.is_strict,
        )

    def _try(self, move: Move[Setting], after: Setting, *, is_late: bool) -> bool:
        """Race a move on top of the best setting, and return whether it was taken."""
        race = self.race
        is_first = not self.taken and not is_late
        kept = self.always_trials if is_first else max(self.last_trials, self.always_trials)
        if not race.allows(self.best, after, *[after] * kept):
            if not is_late:
                self._tried(move, after).row.reason = f"{UNPROVEN}: {race.stopped_by} {LATE}"
            return False
        one = self._tried(move, after)
        before = self.best
        names = self.space.name(before)
        race.note(f"{self.space.name(after)} beside {names}")

        def is_open() -> bool:
            check = self._losses(one)
            return check.within_tolerance is None and check.tolerance == "statistical"

        try:
            failed = race.compare(after, before, reserve=self.last_trials // 2, is_open=is_open)
        except TimeIsUp:
            one.row.reason = f"{UNPROVEN}: {race.stopped_by} {LATE}"
            if not race.results(after):
                self.tried.remove(one)
            return False
        row, gain = one.row, race.gain(after, before)
        row.against, row.gain = names, gain
        if failed is not None or gain is None:
            row.reason = f"failed: {failed}"
            return False
        self._check(one)
        if row.within_tolerance is False and move.is_leaving_out:  # what it removes is wrong
            row.taken, row.reason = True, None
        elif row.taken and (gain.low or 0.0) < LEAST_GAIN:
            is_undecided = gain.median >= LEAST_GAIN and (gain.high or 2.0) > LEAST_GAIN
            row.taken, row.reason = False, UNPROVEN if is_undecided else "no clear gain"
        if row.taken:
            self.taken.append(one)
        return row.taken

    def _check(self, one: Tried[Setting]) -> None:
        """Compare the losses of a move, and set whether they allow to take it."""
        check = self._losses(one)
        for name, value in check.model_dump().items():
            setattr(one.row, name, value)
        kept, row, is_seen = check.within_tolerance, one.row, check.loss_difference is not None
        row.taken = bool(kept) or (kept is None and is_seen and check.tolerance != "statistical")
        unsure = f"{UNPROVEN}: {check.tolerance_reason}" if is_seen else UNSEEN
        row.reason = None if row.taken else DIFFERENT if kept is False else unsure

    def step_back(self, reason: str) -> None:
        """Give up the last move that was taken."""
        one = self.taken.pop()
        one.row.taken, one.row.reason = False, reason

    def rows(self) -> list[Row]:
        """Return what was measured about every move."""
        return [measured(one.row, self.race, one.after) for one in self.tried]
