"""Finds the fastest setting of a recipe on this machine, in bounded time, and writes it.

The search is a coordinate descent from what `auto` chose. Every move is measured beside the start.
The moves that may be faster, given the noise, are repeated until their interval decides or the time
is up. The others are dropped. The winners are then applied one after the other, largest gain first,
and each must be faster than the setting that the ones before it led to. In the end, the best
setting is measured beside the start again.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from flatout.assembly.memory import smallest_machine
from flatout.assembly.recipe import Tolerance
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import assemble
from flatout.config.documents import dump_yaml
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, HardwareError, RunFailed
from flatout.measure.experiments.bench import facts_of, remember
from flatout.measure.experiments.losses import LOSS_STEPS, Trials, tolerance_between
from flatout.measure.experiments.noise import (
    EXPECTED,
    MIN_FREEDOM,
    Spread,
    interval_of,
    pooled,
    spread,
)
from flatout.measure.experiments.points import filling
from flatout.measure.experiments.records import (
    PARTS,
    Best,
    Choice,
    Left,
    LossCheck,
    Rehearsal,
    Row,
    TrialResult,
)
from flatout.measure.experiments.report import NO_TIME, Tuning
from flatout.measure.experiments.resolving import Resolved, resolve_apart
from flatout.measure.experiments.schedule import (
    SAFETY,
    Budget,
    Point,
    RunTrial,
    Schedule,
    require_one_process,
    time_left,
)
from flatout.measure.experiments.space import Move, Setting, Space, make_space
from flatout.measure.experiments.trial import run_trial
from flatout.progress import SILENT, Progress, counted
from flatout.storage.files import write_text

MARK = "# Written by `flatout tune`"
"""The start of a recipe that tune wrote, which tune may therefore replace."""
START = "auto"
"""Name of the setting that `auto` chose."""
ROUNDS, COMBINED_ROUNDS, CONFIRM_ROUNDS = 5, 3, 3
"""Most measurements of a move beside the start, of a winner on top of the other winners, and of the
best setting beside the start in the end."""
LEAST_GAIN = 1.005
"""A move is repeated and tried with others from this ratio on. Less is not worth a change."""
SCREEN_SHARE, RACE_SHARE = 0.6, 0.8
"""Shares of the time after which no further move is measured first, and none is repeated."""
DATA_WAIT = 0.01
"""Share of a step. Reading ahead is tuned where waiting for data takes more."""


def run_tune(
    requested: RunConfig,
    *,
    out: Path,
    minutes: float | None = None,
    only: Sequence[str] = PARTS,
    statistical: bool = False,
    cache: Path | None = None,
    progress: Progress = SILENT,
    trial: RunTrial = run_trial,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Search, write the recipe to `out`, and return what was found.

    Gains of speedups are also kept in `cache`, unless that is None. `auto` then uses them.
    Raises: UsageError before anything is measured; RunFailed when no setting gives results;
            Interrupted when a signal arrives before that.
    """
    start_s, began = clock(), datetime.now().astimezone().isoformat(timespec="seconds")
    require_one_process("tune")
    require_writable(out)
    resolved = resolve_apart(requested, cache, progress)
    space = make_space(requested, resolved, only=only, statistical=statistical)
    if space.obstacle(space.start) is None and not space.moves_from(space.start):
        raise ConfigError(
            f"There is nothing to tune here in {', '.join(space.only)}.",
            fix="Name other parts with --only, or set speedups=auto.",
        )
    batch = requested.batch
    if "batch" in only and (batch.rows_per_device != "auto" or batch.accumulate):
        progress.say(
            f"The recipe sets {space.start.rows} rows per micro-batch. `tune` varies the rows "
            "and the accumulation, and keeps the tokens per optimizer step."
        )
    budget = Budget(len(space.moves) + 5, minutes=minutes, repeats=2, began_s=start_s, clock=clock)
    schedule = Schedule(requested, Trials.of(resolved.config), budget, trial)
    search = Search(schedule, space, resolved.config)
    with schedule.running(progress, "Tuning"):
        search.run()
    if schedule.ended_by_signal is not None:
        search.take_best()
    best = require_figures(search, resolved)
    config, trials = tuned_config(requested, resolved, best), schedule.trials
    name, start = search.name(best), search.name(search.start)
    gain = trials.gain(name, start) if name != start else None
    row = trials.measured(Row(name=name, kind="best", speedups=best.in_order()), name)
    done = {what for result in trials.ok(name).values() for what in result.rehearsed}
    facts = row.model_dump() | {
        "gain": gain,
        "verdict": gain.verdict() if gain else "",
        "rows_per_device": best.rows,
        "accumulate": search.tokens_per_step // (best.rows * config.data.seq_len),
    }
    late = (Left(name=move.name, reason=NO_TIME) for move in search.late)
    found = Tuning(
        **facts_of(requested, resolved, schedule),
        path=str(out),
        began=began,
        wall_s=round(clock() - start_s, 1),
        tokens_per_step=search.tokens_per_step,
        start=start,
        best=Best(
            **facts,
            prefetch=best.prefetch,
            precision=config.train.precision,
            rehearsed=sorted(done),
        ),
        choices=[choice_of(each, search) for each in search.tried if each.after in search.results],
        not_tried=[*{each.name: each for each in (*space.left, *search.left, *late)}.values()],
    )
    lines = found.lines()
    body = dump_yaml(config.to_dict())
    header = "\n".join(f"# {line}".rstrip() for line in lines)
    write_text(out, f"{MARK} on {began[:10]}.\n{header}\n\n{body}")
    remember(found, resolved, cache, progress)
    return found.model_copy(update={"text": lines})


def require_writable(out: Path) -> None:
    """Check, before anything is measured, that tuned.yaml can be written.

    Raises: ConfigError when the path has a different file, or cannot be written.
    """
    other = "Choose a different file with --out FILE."
    if out.is_dir():
        raise ConfigError(f"{out} is a directory.", fix=other)
    try:
        if out.exists() and not out.read_text(encoding="utf-8", errors="replace").startswith(MARK):
            raise ConfigError(f"{out} exists, and `flatout tune` did not write it.", fix=other)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror or error}.", fix=other) from error


def require_figures(search: Search, resolved: Resolved) -> Setting:
    """Return the best setting, once some setting has a result.

    Raises: Interrupted after a signal; HardwareError when nothing fits by estimate; otherwise
            RunFailed, with the last failure.
    """
    if search.best is not None:
        return search.best
    search.schedule.require_uninterrupted()
    machine = smallest_machine(
        workload_of(resolved.config, assemble(search.space.start.in_order()))
    )
    larger = f", or use a larger machine, such as {machine} (`flatout plan` compares)"
    smaller = f"Shorten data.seq_len or choose a smaller model{larger if machine else ''}."
    failed = [result for result in search.results.values() if not result.is_ok]
    if not failed:
        last_left = search.left[-1]
        raise HardwareError(f"Nothing fits. With {last_left.name}: {last_left.reason}", fix=smaller)
    last = failed[-1]
    fixes = {"timed-out": "Give it more --minutes.", "out-of-memory": smaller}
    raise RunFailed(
        f"No setting could be used, and {counted(len(failed), 'trial')} failed. The last one: "
        f"{last.reason}",
        fix=fixes.get(last.status, "Try the same recipe with `flatout train`."),
    )


def choice_of(tried: Tried, search: Search) -> Choice:
    """Return what was measured about a move."""
    result, move, trials = search.results[tried.after], tried.move, search.schedule.trials
    after, before = search.name(tried.after), search.name(tried.before)
    kind = "leave-one-out" if move.is_leaving_out else "add-one"
    row = Row(name=move.name, kind=kind, speedup=move.speedup, against=before)
    gain = trials.gain(after, before) if result.is_ok else None
    failure = result.status + (f": {result.reason}" if result.reason else "")
    facts = trials.measured(row, after).model_dump()
    facts |= (tried.parity or LossCheck()).model_dump()
    facts |= {"status": result.status, "gain": gain, "speedups": tried.after.in_order()}
    facts |= {"verdict": gain.verdict() if gain else failure}
    taken = tried in search.taken
    return Choice(**facts, part=move.part, leaves_out=move.is_leaving_out, taken=taken)


def tuned_config(requested: RunConfig, resolved: Resolved, best: Setting) -> RunConfig:
    """Return the resolved configuration with a setting, for any number of processes.

    batch.accumulate stays open: it follows from the tokens per step and the number of processes.
    """
    recipe = assemble(best.in_order())
    return resolved.config.with_values(
        best.values(resolved.config.batch.tokens_per_step or 0)
        | {
            "train.precision": recipe.precision.name,
            "parallel.replicate": requested.parallel.replicate,
        }
    )


@dataclass(eq=False)
class Tried:
    """A move that was measured, and the setting before it."""

    move: Move
    before: Setting
    after: Setting
    parity: LossCheck | None = None
    """How the losses compare. None for a move that was not worth the comparison."""

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance between the losses of the two settings.

        Other rows per micro-batch add the tolerance of the speedup that chooses them.
        """
        rows = set(filling("micro_batch")) if self.before.rows != self.after.rows else set()
        return tolerance_between(self.after.speedups | rows, self.before.speedups)


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
        self.start = space.start
        """The first setting that could be measured: what `auto` chose, unless that failed."""
        self.best: Setting | None = None
        """None until a setting has a result."""
        self.round = 0
        self._run_tokens = (resolved.train.steps or 1) * self.tokens_per_step
        self._total_s = schedule.budget.left_s

    def run(self) -> None:
        """Search until every move is decided or the time is up."""
        self._start()
        if self.best is not None:
            self._screen()
            self._combine()
            self._confirm()

    def take_best(self) -> None:
        """After an interruption, take the fastest move whose interval is decided, if any is."""
        if self.best is not None and not self.taken:
            for tried in self._ranked(self.tried):
                gain = self._gain(tried)
                if gain and gain[0] > LEAST_GAIN and self._take(tried):
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

    def allows(self, *settings: Setting, reserve_s: float | None = None) -> bool:
        """Return whether there is time for a trial of each setting, and `reserve_s` after them.

        Without it, the time of the slowest setting is reserved, so that any of them can be
        rehearsed at the end.
        """
        reserve_s = self._slowest_s() if reserve_s is None else reserve_s
        return self.schedule.budget.allows(*map(self.name, settings), reserve_s=reserve_s)

    def _slowest_s(self, share: float = 1.0) -> float:
        """Return the seconds to keep for what follows after `share` of the time.

        They are at least those that a trial of the slowest setting takes. 0 before the first.
        """
        ok = [self.name(setting) for setting in self.results if self.is_ok(setting)]
        rest_s = (1 - share) * self._total_s if math.isfinite(self._total_s) else 0.0
        return max(rest_s, SAFETY * max(map(self.schedule.budget.expected_s, ok), default=0.0))

    def is_ok(self, setting: Setting) -> bool:
        """Return whether the setting was measured, and its last trial gave results."""
        return setting in self.results and self.results[setting].is_ok

    def _point(self, setting: Setting) -> Point:
        return Point(self.name(setting), setting.values(self.tokens_per_step))

    def measure(
        self,
        setting: Setting,
        *,
        losses: bool = False,
        rehearse: Sequence[Rehearsal] = (),
        trials_left: int = 2,
    ) -> TrialResult:
        """Measure a setting in this round, and return the result.

        Its first trial rehearses an evaluation.
        """
        left_s = self.schedule.budget.left_s
        left = f", at most {time_left(left_s)} left" if math.isfinite(left_s) else ""
        self.schedule.note(f"{self.name(setting)}{left}")
        self.results[setting] = self.schedule.measure(
            self._point(setting),
            self.round,
            loss_steps=LOSS_STEPS if losses else 0,
            rehearse=rehearse if rehearse or setting in self.results else ["evaluation"],
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
        rates = spread([found.rates(self.name(self.start))])
        twice = Spread(math.sqrt(2) * rates.deviation, rates.freedom)  # a ratio is of two rates
        noise = pooled([found.noise(), twice])
        known = noise if noise.freedom >= MIN_FREEDOM else pooled([EXPECTED, noise])
        return interval_of(ratios, known)

    def check_losses(self, tried: Tried) -> LossCheck:
        """Return whether the losses before and after a move are within the tolerance."""
        pair = self._point(tried.after), self._point(tried.before)
        if tried.tolerance.kind == "exact":
            self.schedule.decide_exact(*pair, reserve_s=self._slowest_s())
        return self.schedule.trials.check(tried.tolerance, *(point.name for point in pair))

    def _start(self) -> None:
        """Measure what `auto` chose. Where that fails, the nearest setting that can run.

        These have fewer rows while memory is short, otherwise one speedup less. Where one row is
        too many, activation checkpointing may make room.
        """
        first, moves = self.space.start, self.space.moves
        candidates = [first]
        for setting in candidates:  # it grows during the loop
            why_not, status = self.space.obstacle(setting), "out-of-memory"
            if why_not is not None:
                self.left.append(Left(name=self.name(setting), reason=why_not))
            elif setting not in self.results:
                if self.results and not self.allows(setting):
                    return
                result = self.measure(setting, losses=True, trials_left=len(moves) + 2)
                if result.is_ok:
                    self.start = self.best = setting
                    self.schedule.budget.plan(0)
                if result.is_ok or result.status == "timed-out":
                    return
                status = result.status
            if setting != first:
                continue
            changes, smallest = [m for m in moves if m.is_leaving_out], first
            if status == "out-of-memory":
                fewer = [rows for rows in self.space.row_counts if rows < first.rows]
                candidates += [replace(first, rows=rows) for rows in reversed(fewer)]
                smallest = replace(first, rows=self.space.row_counts[0])
                changes = [move for move in moves if move.part == "checkpointing"]
            candidates += [after for move in changes if (after := move.apply(smallest))]

    def _screen(self) -> None:
        """Measure each move beside the start, as often as it needs."""
        known = set(self.results)
        for move in self.space.moves_from(self.start):
            after = move.apply(self.start)
            if after is None or after in known:
                continue
            if why_not := self._why_not(move, after):
                self.left.append(Left(name=move.name, reason=why_not))
            else:
                known.add(after)
                self.tried.append(Tried(move, self.start, after))
        self._race(self.start, self.tried, ROUNDS, (SCREEN_SHARE, RACE_SHARE))
        self.late = [tried.move for tried in self.tried if tried.after not in self.results]
        self.tried = [tried for tried in self.tried if tried.after in self.results]

    def _why_not(self, move: Move, after: Setting) -> str | None:
        """Return why a move is not worth a measurement, None when it is."""
        start = self.results[self.start]
        if move.part == "prefetch" and start.data_ms is not None and start.step_ms:
            share = start.data_ms / start.step_ms
            if share < DATA_WAIT:
                return f"not tried: waiting for data takes {share:.1%} of a step."
        for other, result in self.results.items():
            is_smaller = other.speedups == after.speedups and other.rows <= after.rows
            if is_smaller and result.status == "out-of-memory":
                return f"not tried: {other.rows} rows ran out of memory."
        return self.space.obstacle(after)

    def _race(
        self,
        before: Setting,
        moves: Sequence[Tried],
        rounds: int,
        shares: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Measure moves beside the setting before them, in rounds, until each is decided.

        After `shares` of the time, the first round and the others measure no more.
        """
        trials = self.schedule.trials
        for number in range(rounds):
            reserve_s = self._slowest_s(shares[number > 0])
            due = [tried for tried in self._ranked(moves) if not self._is_decided(tried)]
            first = [] if self.round in trials.ok(self.name(before)) else [before]
            later = [] if before == self.start else [self.start]  # to compare at the end
            if not due or not self.allows(*first, due[0].after, *later, reserve_s=reserve_s):
                return
            with_losses = [
                tried
                for tried in due
                if tried.tolerance.kind == "statistical"
                or not trials.loss_pairs(self.name(tried.after), self.name(before))
            ]
            for setting in first:  # its repeats show the noise, which decides what else to repeat
                self.measure(setting, losses=bool(with_losses))
            for index, tried in enumerate(due):
                if not self._is_decided(tried) and self.allows(tried.after, reserve_s=reserve_s):
                    left = 2 * (len(due) - index)
                    self.measure(tried.after, losses=tried in with_losses, trials_left=left)
            self.round += 1

    def _gain(self, tried: Tried) -> tuple[float, float, float] | None:
        """Return the interval of a move's gain. None when the setting fails."""
        return self.interval(tried.after, tried.before) if self.is_ok(tried.after) else None

    def _ranked(self, moves: Sequence[Tried]) -> list[Tried]:
        """Return the moves, the largest gain first, those without results last."""
        return sorted(moves, key=lambda tried: -(self._gain(tried) or (0.0, 0.0, 0.0))[1])

    def _is_decided(self, tried: Tried) -> bool:
        """Return whether a move needs no further measurement."""
        found = self._gain(tried)
        if found is None:
            return tried.after in self.results and not self.is_ok(tried.after)
        if found[2] < LEAST_GAIN:
            return True
        if tried.tolerance.kind == "statistical":
            return len(self.schedule.trials.ok(self.name(tried.after))) >= ROUNDS
        return found[0] > LEAST_GAIN

    def _combine(self) -> None:
        """Apply the winners one after the other, and follow the rows in their direction.

        The first ones remove speedups whose losses exceed their tolerance. The time that is then
        left is for the moves that had none before.
        """
        queue: list[Move] = []
        for tried in self.tried:
            if tried.move.is_leaving_out and self.is_ok(tried.after):
                names = self.name(tried.after), self.name(tried.before)
                found = self.schedule.trials.check(tried.tolerance, *names)
                tried.parity = None if found.within_tolerance is None else found
                queue += [tried.move] if found.within_tolerance is False else []
        for tried in self._ranked(self.tried):
            gain = self._gain(tried)
            if gain and gain[1] > LEAST_GAIN and tried.move not in queue:
                queue.append(tried.move)
        queue += self.late
        while queue:
            on_top = self._on_top(queue.pop(0))
            if on_top is None or not self._take(on_top):
                continue
            further = self.space.further(on_top.before, on_top.after)
            after = further.apply(on_top.after) if further else None
            if further and after and self._why_not(further, after) is None:
                queue.insert(0, further)
        tried_moves = [tried.move for tried in self.tried]
        self.late = [move for move in self.late if move not in tried_moves]

    @property
    def _here(self) -> Setting:
        """The best setting so far, once there is one."""
        assert self.best is not None
        return self.best

    def _on_top(self, move: Move) -> Tried | None:
        """Return a move applied to the best setting, measured until it is decided."""
        before, after = self._here, move.apply(self._here)
        if after is None or after == before:
            return None
        for tried in self.tried:
            if (tried.before, tried.after) == (before, after):
                return tried
        tried = Tried(move, before, after)
        self._race(before, [tried], COMBINED_ROUNDS)
        if after not in self.results:
            return None
        self.tried.append(tried)
        return tried

    def _take(self, tried: Tried) -> bool:
        """Make a move if it is faster and within its tolerance, and return whether it was made.

        It is faster if its whole interval is above 1.
        """
        found = self._gain(tried)
        if found is None:
            return False
        parity = tried.parity = self.check_losses(tried)
        kept = parity.within_tolerance
        is_sure = kept or (kept is None and parity.tolerance != "statistical")
        leaves_out_broken = kept is False and tried.move.is_leaving_out
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
        while self.best is not None and confirmed < CONFIRM_ROUNDS:
            best, start = self.best, self.start
            settings = [*dict.fromkeys([start, best])]
            if not self.allows(*settings, reserve_s=None if confirmed else 0.0):
                if confirmed or not self.allows(best, reserve_s=0.0):
                    return
                settings = [best]
            self.round += 1
            for setting in settings:
                is_first = setting == best and not confirmed
                self.measure(setting, rehearse=["evaluation", "save"] if is_first else ())
            if start == best and self.is_ok(best):
                return
            confirmed += 1
            for first in dict.fromkeys(each.after for each in self.taken if each.before == start):
                if self.is_ok(best) and first != best and self.allows(first):
                    self.measure(first)
            found, parity = (
                self.interval(best, start),
                self.taken[-1].parity if self.taken else None,
            )
            is_broken = parity is not None and parity.within_tolerance is False
            is_slower = found is not None and found[0] <= 1 and not is_broken
            if not self.is_ok(best) or (confirmed == CONFIRM_ROUNDS and is_slower):
                confirmed = 0
                self._step_back()

    def _step_back(self) -> None:
        """Give up the best setting for the one before it, or for a different measured one."""
        if self.taken:
            self.best = self.taken.pop().before
            return
        ok = [setting for setting in self.results if self.is_ok(setting)]
        self.best = max(ok, key=lambda each: self.results[each].tokens_per_s or 0.0, default=None)
        self.start = self.best or self.start
