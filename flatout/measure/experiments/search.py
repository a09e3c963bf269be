"""The search of `flatout tune`: coordinate descent from what `auto` chose.

Every move is measured once, beside the start. The moves that may be faster, given the noise, are
repeated until their interval decides or the time is up; the others are dropped. The winners are
then applied one after the other, largest gain first, and each must be faster than the setting
that the ones before it led to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flatout.assembly.recipe import Promise
from flatout.config.schema import RunConfig
from flatout.measure.experiments.losses import LOSS_STEPS, LossCheck, promise_between
from flatout.measure.experiments.noise import EXPECTED, Spread, interval_of, pooled, spread
from flatout.measure.experiments.records import Left, Rehearsal, TrialResult
from flatout.measure.experiments.schedule import SAFETY, Point, Schedule, time_left
from flatout.measure.experiments.space import Move, Setting, Space
from flatout.measure.experiments.sweep import filling

START = "auto"
"""Name of the setting that `auto` chose."""
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


@dataclass(eq=False)
class Tried:
    """A move that was measured, and the setting before it."""

    move: Move
    before: Setting
    after: Setting
    parity: LossCheck | None = None
    """How the losses compare; None for a move that was not worth the comparison."""


class Search:
    """Searches the space. After an interruption, `best` and `tried` are the results so far."""

    def __init__(self, schedule: Schedule, space: Space, resolved: RunConfig) -> None:
        self.schedule, self.space = schedule, space
        self.tokens_per_step = resolved.batch.tokens_per_step or 0
        """Tokens per optimizer step, the same in every trial."""
        self.results: dict[Setting, TrialResult] = {}
        """The last result of each setting."""
        self.tried: list[Tried] = []
        self.taken: list[Tried] = []
        """The moves that lead from the start to `best`, in this order."""
        self.left: list[Left] = []
        self.late: list[Move] = []
        """The moves for which there was no time."""
        self.start: Setting | None = None
        """The first setting that could be measured: what `auto` chose, unless that failed."""
        self.best: Setting | None = None
        """None until a setting has given figures."""
        self._run_tokens = (resolved.train.steps or 1) * self.tokens_per_step
        self._total_s = schedule.budget.left_s
        self._round = 0

    def run(self) -> None:
        """Search until every move is decided or the time is up."""
        self._start()
        if self.best is None:
            return
        self._screen()
        self._repeat()
        self._combine()
        self._confirm()

    def take_best(self) -> None:
        """After an interruption, take the fastest move whose interval is decided, if any is."""
        for gain, tried in [] if self.best is None or self.taken else self._ranked():
            if gain[0] > LEAST_GAIN and self._take(tried):
                return

    def name(self, setting: Setting) -> str:
        """Return the setting's name: how it differs from what `auto` chose."""
        start = self.space.start
        parts = [
            *([f"rows {setting.rows}"] if setting.rows != start.rows else []),
            *([f"prefetch {setting.prefetch}"] if setting.prefetch != start.prefetch else []),
            *(f"+ {name}" for name in sorted(setting.speedups - start.speedups)),
            *(f"- {name}" for name in sorted(start.speedups - setting.speedups)),
        ]
        return ", ".join(parts) or START

    @property
    def base(self) -> str:
        """The name of the first setting that gave figures; the noise is that of ratios to it."""
        return self.name(self.start or self.space.start)

    def allows(self, *settings: Setting, reserve_s: float | None = None) -> bool:
        """Return whether there is time for a trial of each setting, and `reserve_s` after them.

        Without it, the time of the slowest setting is reserved, so that any of them can be
        rehearsed at the end.
        """
        reserve_s = self._slowest_s() if reserve_s is None else reserve_s
        return self.schedule.budget.allows(*map(self.name, settings), reserve_s=reserve_s)

    def _slowest_s(self, share: float = 1.0) -> float:
        """Return the seconds to keep for what follows after `share` of the time.

        They are at least those that a trial of the slowest setting takes; 0 before the first.
        """
        times = (self.schedule.budget.expected_s(self.name(each)) for each in self._ok())
        rest_s = (1 - share) * self._total_s if math.isfinite(self._total_s) else 0.0
        return max(rest_s, SAFETY * max(times, default=0.0))

    def _ok(self) -> list[Setting]:
        return [setting for setting in self.results if self.is_ok(setting)]

    def is_ok(self, setting: Setting) -> bool:
        """Return whether the setting was measured, and its last trial gave figures."""
        return setting in self.results and self.results[setting].is_ok

    def _point(self, setting: Setting) -> Point:
        return Point(self.name(setting), setting.values(self.tokens_per_step))

    def measure(
        self,
        setting: Setting,
        number: int,
        *,
        losses: bool = False,
        rehearse: Sequence[Rehearsal] = (),
        trials_left: int = 2,
    ) -> TrialResult:
        """Measure a setting in round `number`, and return the result."""
        left_s = self.schedule.budget.left_s
        left = f", at most {time_left(left_s)} left" if math.isfinite(left_s) else ""
        self.schedule.note(f"{self.name(setting)}{left}")
        self.results[setting] = self.schedule.measure(
            self._point(setting),
            number,
            loss_steps=LOSS_STEPS if losses else 0,
            rehearse=rehearse,
            trials_left=trials_left,
        )
        return self.results[setting]

    def interval(self, one: Setting, other: Setting) -> tuple[float, float, float] | None:
        """Return how many times faster `one` finishes the run than `other`: low, median, high.

        The interval is for deciding what to repeat: its noise is an assumption that repeats
        replace. None when no round has both.
        """
        found = self.schedule.trials.over(self._run_tokens)
        ratios = found.ratios(self.name(one), self.name(other))
        if not ratios:
            return None
        rates = spread([found.rates(self.base)])
        twice = Spread(math.sqrt(2) * rates.deviation, rates.freedom)  # a ratio is of two rates
        return interval_of(ratios, pooled([EXPECTED, found.noise(self.base), twice]))

    def parity(self, one: Setting, other: Setting) -> LossCheck:
        """Return whether the losses of `one` and `other` differ by no more than promised."""
        trials, promise = self.schedule.trials, promise_of(one, other)
        if trials.needs_deterministic(promise, self.name(one), self.name(other)):
            points = map(self._point, (one, other))
            self.schedule.run_deterministic(points, reserve_s=self._slowest_s())
        return trials.check(promise, self.name(one), self.name(other))

    def _start(self) -> None:
        """Measure what `auto` chose; where that fails, the nearest setting that can run."""
        for setting in self._fallbacks():
            if self.results and not self.allows(setting):
                return
            count = len(self.space.moves) + 2
            result = self.measure(
                setting, 0, losses=True, rehearse=["evaluation"], trials_left=count
            )
            if result.is_ok:
                self.start = self.best = setting
                self.schedule.budget.plan(0)
            if result.is_ok or result.status == "timed-out":
                return

    def _fallbacks(self) -> Iterator[Setting]:
        """Yield the start; then fewer rows while memory is short, or without one speedup each.

        Where one row is too many, activation checkpointing may make room.
        """
        first = self.space.start
        yield from self._fitting([first])
        failed = self.results.get(first)
        if failed is None or failed.status == "out-of-memory":
            fewer = [rows for rows in self.space.ladder if rows < first.rows][::-1]
            smallest = replace(first, rows=self.space.ladder[0])
            savers = [move for move in self.space.moves if move.part == "checkpointing"]
            candidates = [replace(first, rows=rows) for rows in fewer]
            candidates += [after for move in savers if (after := move.apply(smallest))]
        else:
            without = [move for move in self.space.moves if move.is_leaving_out]
            candidates = [after for move in without if (after := move.apply(first))]
        yield from self._fitting(candidates)

    def _fitting(self, settings: Sequence[Setting]) -> Iterator[Setting]:
        """Yield the settings that may fit into memory, and keep why the others cannot."""
        for setting in dict.fromkeys(settings):
            if (why_not := self.space.obstacle(setting)) is None:
                yield setting
            else:
                self.left.append(Left(name=self.name(setting), reason=why_not))

    def _screen(self) -> None:
        """Measure each move once."""
        start, reserve_s = self._here, self._slowest_s(SCREEN_SHARE)
        moves = [move for move in self.space.moves_from(start) if self._is_open(move, start)]
        for index, move in enumerate(moves):
            after = move.apply(start)
            if after is None or after in self.results:
                continue
            if not self.allows(after, reserve_s=reserve_s):
                self.late.append(move)
                continue
            self.tried.append(Tried(move, start, after))
            count = 2 * (len(moves) - index)
            self.measure(after, 0, losses=True, rehearse=["evaluation"], trials_left=count)

    def _is_open(self, move: Move, start: Setting) -> bool:
        """Return whether a move is worth a measurement, and keep the reason if it is not."""
        after, result = move.apply(start), self.results[start]
        why_not = self._too_large(after) if after else None
        if move.part == "prefetch" and result.data_ms is not None and result.step_ms:
            share = result.data_ms / result.step_ms
            if share < DATA_WAIT:
                why_not = f"not tried: waiting for data takes {share:.1%} of a step."
        if why_not:
            self.left.append(Left(name=move.name, reason=why_not))
        return why_not is None

    def _too_large(self, setting: Setting) -> str | None:
        """Return why a setting cannot fit: by estimate, or after a trial with fewer rows."""
        for other, result in self.results.items():
            is_smaller = other.speedups == setting.speedups and other.rows <= setting.rows
            if is_smaller and result.status == "out-of-memory":
                return f"not tried: {other.rows} rows ran out of memory."
        return self.space.obstacle(setting)

    @property
    def _here(self) -> Setting:
        """The best setting so far, once there is one."""
        assert self.best is not None
        return self.best

    def _gain(self, tried: Tried) -> tuple[float, float, float] | None:
        """Return the interval of a move's gain; None when the setting fails."""
        return self.interval(tried.after, tried.before) if self.is_ok(tried.after) else None

    def _ranked(self) -> list[tuple[tuple[float, float, float], Tried]]:
        """Return the moves with figures and their gains, the largest first."""
        found = [(gain, tried) for tried in self.tried if (gain := self._gain(tried))]
        return sorted(found, key=lambda pair: -pair[0][1])

    def _is_decided(self, tried: Tried) -> bool:
        """Return whether a move needs no further measurement."""
        found = self._gain(tried)
        if found is None or found[2] < LEAST_GAIN:
            return True
        if _needs_seeds(tried):
            return len(self.schedule.trials.ok(self.name(tried.after))) >= ROUNDS
        return found[0] > LEAST_GAIN

    def _repeat(self) -> None:
        """Repeat the moves that may be faster until each is decided, those that lead first."""
        start, reserve_s = self._here, self._slowest_s(RACE_SHARE)
        for number in range(1, ROUNDS):
            if not self.tried or not self.allows(start, start, reserve_s=reserve_s):
                return
            self._round = number
            # first, because its repeats show the noise, which decides what else to repeat
            self.measure(start, number, losses=any(map(_needs_seeds, self.tried)))
            undecided = [tried for _, tried in self._ranked() if not self._is_decided(tried)]
            if not undecided:
                return
            for tried in undecided:
                if self.allows(tried.after, reserve_s=reserve_s):
                    self.measure(tried.after, number, losses=_needs_seeds(tried))

    def _combine(self) -> None:
        """Apply the winners one after the other, and follow the rows in their direction.

        The time that is then left is for the moves that the screening did not reach.
        """
        queue = [tried.move for tried in self._broken()]
        for gain, tried in self._ranked():
            if gain[1] > LEAST_GAIN and tried.move not in queue:
                queue.append(tried.move)
        while queue or self.late:
            if not queue:
                after = self.late[0].apply(self._here)
                if after and not self.allows(self._here, after, self._here):
                    return
                queue.append(self.late.pop(0))
            on_top = self._on_top(queue.pop(0))
            if on_top is None or not self._take(on_top):
                continue
            further = self.space.further(on_top.before, on_top.after)
            after = further.apply(on_top.after) if further else None
            if further and after and self._too_large(after) is None:
                queue.insert(0, further)

    def _broken(self) -> list[Tried]:
        """Return the moves that leave out a speedup whose losses break its promise."""
        found = []
        for tried in self.tried:
            kind = promise_of(tried.after, tried.before).kind
            takes_runs = kind == "exact" and not self.schedule.trials.repeats_to_the_bit
            if (
                tried.move.is_leaving_out
                and self.is_ok(tried.after)
                and not takes_runs  # they are worth it for a move that is faster
            ):
                tried.parity = self.parity(tried.after, tried.before)
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
        tried, names = Tried(move, before, after), (self.name(before), self.name(after))
        for _ in range(COMBINED_ROUNDS):
            if not self.allows(before, after, self.start or before):  # to compare at the end
                break
            self._round += 1
            is_new = not self.schedule.trials.loss_pairs(*names)
            rehearse: list[Rehearsal] = [] if after in self.results else ["evaluation"]
            self.measure(before, self._round, losses=is_new)
            self.measure(after, self._round, losses=is_new, rehearse=rehearse)
            if self._is_decided(tried):
                break
        if self._gain(tried) is None and after not in self.results:
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
        parity = tried.parity = self.parity(tried.after, tried.before)
        is_sure = parity.kept or (parity.kept is None and parity.promise.kind != "statistical")
        leaves_out_broken = parity.kept is False and tried.move.is_leaving_out
        if not leaves_out_broken and not (found[0] > 1 and is_sure):
            return False
        self.taken.append(tried)
        self.best = tried.after
        return True

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
                self.measure(setting, self._round, rehearse=rehearse if setting == best else [])
            if not self.is_ok(best):
                confirmed = 0
                self._step_back()
                if self.best is None:
                    return
                continue
            if start == best:
                return
            confirmed += 1
            for first in dict.fromkeys(t.after for t in self.taken if t.before == start):
                if first != best and self.allows(first):
                    self.measure(first, self._round)
            if confirmed == CONFIRM_ROUNDS and not self._is_faster(best, start):
                confirmed = 0
                self._step_back()

    def _to_confirm(self, confirmed: int) -> list[Setting]:
        """Return what there is time to measure: start and best, or only the best."""
        both = [*dict.fromkeys([self.start or self._here, self._here])]
        if self.allows(*both, reserve_s=None if confirmed else 0.0):
            return both
        return [] if confirmed or not self.allows(both[-1], reserve_s=0.0) else both[-1:]

    def _is_faster(self, best: Setting, start: Setting) -> bool:
        """Return whether the best setting is faster than the start, or must replace it anyway."""
        found = self.interval(best, start)
        parity = self.taken[-1].parity if self.taken else None
        is_broken = parity is not None and parity.kept is False
        return is_broken or found is None or found[0] > 1

    def _step_back(self) -> None:
        """Give up the best setting for the one before it, or for another one that was measured."""
        if self.taken:
            self.best = self.taken.pop().before
            return
        rates = {setting: self.results[setting].tokens_per_s or 0.0 for setting in self._ok()}
        self.best = self.start = max(rates, key=lambda setting: rates[setting], default=None)


def promise_of(one: Setting, other: Setting) -> Promise:
    """Return the promise about the losses of two settings.

    Other rows per micro-batch add the promise of the speedup that chooses them.
    """
    rows = set(filling("micro_batch")) if one.rows != other.rows else set()
    return promise_between(one.speedups | rows, other.speedups)


def _needs_seeds(tried: Tried) -> bool:
    """Return whether a move's promise is about the losses over several seeds."""
    return promise_of(tried.after, tried.before).kind == "statistical"
