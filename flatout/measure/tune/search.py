"""The search of `flatout tune`: coordinate descent from what `auto` chose.

Every move is measured once, beside the start. The moves that may be faster, given the noise, are
repeated until their interval decides or the time is up; the others are dropped. The winners are
then applied one after the other, largest gain first, and each must be faster than the setting
that the ones before it led to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flatout.measure.trials.promises import LossCheck
from flatout.measure.trials.spec import Rehearsal
from flatout.measure.tune.race import Race, promise_of
from flatout.measure.tune.space import Left, Move, Setting, Space

ROUNDS = 5
"""Most measurements of one comparison."""
COMBINED_ROUNDS = 3
"""Most measurements of a winner on top of the other winners."""
CONFIRM_ROUNDS = 3
"""Further measurements of the best setting beside the start."""
LEAST_GAIN = 1.005
"""A move is repeated and tried with others from this ratio on; less is not worth a change."""
SCREEN_SHARE, RACE_SHARE = 0.6, 0.8
"""Shares of the time after which no further move is measured first, and none is repeated."""
DATA_WAIT = 0.01
"""Share of a step; reading ahead is tuned where waiting for data takes more."""
NO_TIME = "not measured: the time was up before its turn."


@dataclass
class Tried:
    """A move that was measured, and the setting before it."""

    move: Move
    before: Setting
    after: Setting
    taken: bool = False
    parity: LossCheck | None = None
    """How the losses compare; None for a move that was not worth the comparison."""


@dataclass
class Search:
    """Searches the space. After an interruption, `best` and `tried` are the results so far."""

    race: Race
    space: Space
    tried: list[Tried] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    late: list[Move] = field(default_factory=list)
    """The moves for which there was no time."""
    taken: list[Tried] = field(default_factory=list)
    """The moves that lead from the start to `best`, in this order."""
    start: Setting | None = None
    """The first setting that could be measured: what `auto` chose, unless that failed."""
    best: Setting | None = None
    """None until a setting has given figures."""
    _round: int = 0

    def run(self) -> None:
        """Search until every move is decided or the time is up."""
        self._total_s = self.race.budget.left_s
        self._start()
        if self.best is None:
            return
        self._screen()
        self._repeat()
        self._combine()
        self._confirm()

    def take_best(self) -> None:
        """After an interruption, take the fastest move whose interval is decided, if any is."""
        self.race.is_over = True
        if self.best is None or self.taken:
            return
        found = [(gain, tried) for tried in self.tried if (gain := self._gain(tried))]
        for gain, tried in sorted(found, key=lambda pair: -pair[0][1]):
            if gain[0] > LEAST_GAIN and self._take(tried):
                return

    def _reserve_s(self, share: float) -> float:
        """Return the seconds to keep for what follows after `share` of the time."""
        rest_s = (1 - share) * self._total_s if math.isfinite(self._total_s) else 0.0
        return max(rest_s, self.race.slowest_s)

    def _start(self) -> None:
        """Measure what `auto` chose; where that fails, the nearest setting that can run."""
        for setting in self._fallbacks():
            if self.race.results and not self.race.allows(setting):
                return
            count = len(self.space.moves) + 2
            result = self.race.measure(
                setting, 0, losses=True, rehearse=["evaluation"], trials_left=count
            )
            if result.is_ok:
                self.start = self.best = self.race.base = setting
                self.race.budget.plan(0)
            if result.is_ok or result.status == "timed-out":
                return

    def _fallbacks(self) -> Iterator[Setting]:
        """Yield the start; then fewer rows while memory is short, or without one speedup each.

        Where one row is too many, activation checkpointing may make room.
        """
        first = self.space.start
        if self.space.obstacle(first) is None:
            yield first
        else:
            self.left.append(Left(self.race.name(first), str(self.space.obstacle(first))))
        failed = self.race.results.get(first)
        if failed is None or failed.status == "out-of-memory":
            fewer = [rows for rows in self.space.ladder if rows < first.rows][::-1]
            smallest = replace(first, rows=self.space.ladder[0])
            savers = [move for move in self.space.moves if move.part == "checkpointing"]
            candidates = [replace(first, rows=rows) for rows in fewer]
            candidates += [after for move in savers if (after := move.apply(smallest))]
        else:
            without = [move for move in self.space.moves if move.is_leaving_out]
            candidates = [after for move in without if (after := move.apply(first))]
        for setting in dict.fromkeys(candidates):
            if (why_not := self.space.obstacle(setting)) is None:
                yield setting
            else:
                self.left.append(Left(self.race.name(setting), why_not))

    def _screen(self) -> None:
        """Measure each move once."""
        start, reserve_s = self._here, self._reserve_s(SCREEN_SHARE)
        moves = [move for move in self.space.moves_from(start) if self._is_open(move, start)]
        for index, move in enumerate(moves):
            after = move.apply(start)
            if after is None or after in self.race.results:
                continue
            if not self.race.allows(after, reserve_s=reserve_s):
                self.late.append(move)
                continue
            self.tried.append(Tried(move, start, after))
            count = len(moves) - index
            self.race.measure(after, 0, losses=True, rehearse=["evaluation"], trials_left=2 * count)

    def _is_open(self, move: Move, start: Setting) -> bool:
        """Return whether a move is worth a measurement, and keep the reason if it is not."""
        after, result = move.apply(start), self.race.results[start]
        why_not = self._too_large(after) if after else None
        if move.part == "prefetch" and result.data_ms is not None and result.step_ms:
            share = result.data_ms / result.step_ms
            if share < DATA_WAIT:
                why_not = f"not tried: waiting for data takes {share:.1%} of a step."
        if why_not:
            self.left.append(Left(move.name, why_not))
        return why_not is None

    def _too_large(self, setting: Setting) -> str | None:
        """Return why a setting cannot fit: by estimate, or after a trial with fewer rows."""
        for other, result in self.race.results.items():
            if (
                result.status == "out-of-memory"
                and other.speedups == setting.speedups
                and other.rows <= setting.rows
            ):
                return f"not tried: {other.rows} rows ran out of memory."
        return self.space.obstacle(setting)

    @property
    def _here(self) -> Setting:
        """The best setting so far, once there is one."""
        assert self.best is not None
        return self.best

    def _gain(self, tried: Tried) -> tuple[float, float, float] | None:
        """Return the interval of a move's gain; None when the setting fails."""
        if not self.race.is_ok(tried.after):
            return None
        return self.race.interval(tried.after, tried.before)

    def _is_decided(self, tried: Tried) -> bool:
        """Return whether a move needs no further measurement."""
        found = self._gain(tried)
        if found is None or found[2] < LEAST_GAIN:
            return True
        if self._needs_seeds(tried):
            return self.race.repeats(tried.after) >= ROUNDS
        return found[0] > LEAST_GAIN

    def _repeat(self) -> None:
        """Repeat the moves that may be faster until each is decided, those that lead first."""
        start, reserve_s = self._here, self._reserve_s(RACE_SHARE)
        for number in range(1, ROUNDS):
            if not self.tried or not self.race.allows(start, start, reserve_s=reserve_s):
                return
            over_seeds = [t for t in self.tried if self._needs_seeds(t)]
            self._round = number
            # first, because its repeats show the noise, which decides what else to repeat
            self.race.measure(start, number, losses=bool(over_seeds))
            undecided = [tried for tried in self.tried if not self._is_decided(tried)]
            if not undecided:
                return
            undecided.sort(key=lambda tried: -(self._gain(tried) or (0, 0, 0))[1])
            for tried in undecided:
                if self.race.allows(tried.after, reserve_s=reserve_s):
                    self.race.measure(tried.after, number, losses=tried in over_seeds)

    def _needs_seeds(self, tried: Tried) -> bool:
        """Return whether a move's promise is about the losses over several seeds."""
        return promise_of(tried.after, tried.before).kind == "statistical"

    def _combine(self) -> None:
        """Apply the winners one after the other, and follow the rows in their direction.

        The time that is then left is for the moves that the screening did not reach.
        """
        ranked = [(found, tried) for tried in self.tried if (found := self._gain(tried))]
        ranked.sort(key=lambda pair: -pair[0][1])
        queue = [tried.move for tried in self._broken()]
        queue += [
            tried.move
            for found, tried in ranked
            if found[1] > LEAST_GAIN and tried.move not in queue
        ]
        while queue or self.late:
            if not queue:
                after = self.late[0].apply(self._here)
                if after and not self.race.allows(self._here, after, self._here):
                    return
                queue.append(self.late.pop(0))
            move = queue.pop(0)
            tried = self._on_top(move)
            if tried is None or not self._take(tried):
                continue
            further = self.space.further(tried.before, tried.after)
            after = further.apply(tried.after) if further else None
            if further and after and self._too_large(after) is None:
                queue.insert(0, further)

    def _broken(self) -> list[Tried]:
        """Return the moves that leave out a speedup whose losses break its promise."""
        found = []
        for tried in self.tried:
            promise = promise_of(tried.after, tried.before)
            takes_runs = promise.kind == "exact" and not self.race.measured.repeats_to_the_bit
            if (
                tried.move.is_leaving_out
                and self.race.is_ok(tried.after)
                and not takes_runs  # they are worth it for a move that is faster
            ):
                tried.parity = self.race.parity(tried.after, tried.before)
                if tried.parity.kept is False:
                    found.append(tried)
        return found

    def _on_top(self, move: Move) -> Tried | None:
        """Return a move applied to the best setting, measured until it is decided."""
        before = self._here
        after = move.apply(before)
        if after is None or after == before:
            return None
        known = next((t for t in self.tried if (t.before, t.after) == (before, after)), None)
        if known is not None:
            return known
        tried = Tried(move, before, after)
        for _ in range(COMBINED_ROUNDS):
            if not self.race.allows(before, after, self.start or before):  # to compare at the end
                break
            self._round += 1
            is_new = not self.race.has_losses(before, after)
            self.race.measure(before, self._round, losses=is_new)
            rehearse: list[Rehearsal] = [] if after in self.race.results else ["evaluation"]
            self.race.measure(after, self._round, losses=is_new, rehearse=rehearse)
            if self._is_decided(tried):
                break
        if self._gain(tried) is None and after not in self.race.results:
            return None
        self.tried.append(tried)
        return tried

    def _take(self, tried: Tried) -> bool:
        """Make a move if it is faster and keeps its promise; return whether it was made.

        It is faster if its whole interval lies above 1.
        """
        found = self._gain(tried)
        if found is None:
            return False
        tried.parity = self.race.parity(tried.after, tried.before)
        is_sure = tried.parity.kept is True or (
            tried.parity.kept is None and tried.parity.promise.kind != "statistical"
        )
        leaves_out_broken = tried.parity.kept is False and tried.move.is_leaving_out
        if leaves_out_broken or (found[0] > 1 and is_sure):
            tried.taken = True
            self.taken.append(tried)
            self.best = tried.after
        return tried.taken

    def _confirm(self) -> None:
        """Measure the best setting beside the start, and rehearse an evaluation and a save with it.

        A setting that fails, or is not faster than the start after all, gives way to the one before
        it. The moves that led from the start are repeated as well, so that their gains get
        intervals.
        """
        confirmed = 0
        while confirmed < CONFIRM_ROUNDS and (settings := self._to_confirm(confirmed)):
            best, start = self._here, self.start or self._here
            self._round += 1
            rehearse: list[Rehearsal] = [] if confirmed else ["evaluation", "save"]
            for setting in settings:
                rehearsal = rehearse if setting == best else []
                self.race.measure(setting, self._round, rehearse=rehearsal)
            if not self.race.is_ok(best):
                confirmed = 0
                self._step_back()
                if self.best is None:
                    return
                continue
            if start == best:
                return
            confirmed += 1
            for first in dict.fromkeys(t.after for t in self.taken if t.before == start):
                if first != best and self.race.allows(first):
                    self.race.measure(first, self._round)
            if confirmed == CONFIRM_ROUNDS and not self._is_faster(best, start):
                confirmed = 0
                self._step_back()

    def _to_confirm(self, confirmed: int) -> list[Setting]:
        """Return what there is time to measure: start and best, or only the best."""
        both = [*dict.fromkeys([self.start or self._here, self._here])]
        if self.race.allows(*both, reserve_s=None if confirmed else 0.0):
            return both
        return [] if confirmed or not self.race.allows(both[-1], reserve_s=0.0) else both[-1:]

    def _is_faster(self, best: Setting, start: Setting) -> bool:
        """Return whether the best setting is faster than the start, or must replace it anyway."""
        found = self.race.interval(best, start)
        parity = self.taken[-1].parity if self.taken else None
        is_broken = parity is not None and parity.kept is False
        return is_broken or found is None or found[0] > 1

    def _step_back(self) -> None:
        """Give up the best setting for the one before it, or for another one that was measured."""
        if self.taken:
            last = self.taken.pop()
            last.taken, self.best = False, last.before
            return
        rates = {
            setting: result.tokens_per_s or 0.0
            for setting, result in self.race.results.items()
            if result.is_ok
        }
        self.best = self.start = max(rates, key=lambda setting: rates[setting], default=None)
        self.race.base = self.best or self.space.start
