"""Finds the fastest setting of a recipe on this machine in bounded time, and writes it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from flatout.assembly.batch import sequences_of
from flatout.assembly.choices import assemble, parse_request, speedup_named, speedups_for
from flatout.config.documents import dump_yaml
from flatout.config.schema import RunConfig
from flatout.display import terminal_text
from flatout.errors import ConfigError, HardwareError, in_shell
from flatout.measure.attach.request import Timing
from flatout.measure.bench import WARM_S, draws_of, remember, train
from flatout.measure.moves import (
    AHEAD,
    ROWS,
    Move,
    Setting,
    SpeedupMove,
    ablation,
    in_order,
    memory_obstacle,
    rows_to_try,
    setting_of,
    tolerance_between,
)
from flatout.measure.output import require_own
from flatout.measure.race import LOSS_STEPS, Race, Row, absent_row
from flatout.measure.resolving import Resolved, resolve_apart
from flatout.measure.results import PARTS, Tuning, facts_of, late_ones
from flatout.measure.search import Search
from flatout.measure.trial import Result, require_one_process
from flatout.progress import SILENT, Progress
from flatout.storage.files import write_text

MARK = "# Written by `flatout tune`"
"""The start of a recipe that tune wrote, which tune may therefore replace."""
SECONDS = 3.0
"""Seconds of measured steps per trial."""
LONGEST_SHARE = 0.25
"""Share of the time after which a trial is ended, and half of it before anything was measured."""
DATA_WAIT = 0.01
"""Share of a step. Reading ahead is tuned where waiting for data takes more."""
COMMENT_COLUMNS = 98
NOT_REHEARSED = "No evaluation and save was rehearsed: the time was up."
SMALLER = (
    "Set a smaller batch.rows_per_device, shorten data.seq_len, or use a larger machine (`flatout "
    "plan` compares them)."
)


def run_tune(
    requested: RunConfig,
    *,
    out: Path,
    minutes: float | None = None,
    only: Sequence[str] = PARTS,
    statistical: bool = False,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Tuning:
    """Search, write the recipe to `out`, and return what was found.

    Gains of speedups are also kept in `cache`, unless that is None. `auto` then uses them.

    Raises: UsageError before anything is measured; RunFailed when no setting gives results;
            Interrupted when a signal arrives before that.
    """
    start_s, began = time.monotonic(), datetime.now().astimezone().isoformat(timespec="seconds")
    require_one_process("tune")
    require_own(out, is_own=out.is_file() and out.read_bytes().startswith(MARK.encode()))
    resolved = resolve_apart(requested, cache, progress)
    space = space_of(requested, resolved, only, statistical=statistical)
    start, batch = space.start, requested.batch
    if obstacle := space.obstacle(start):
        raise HardwareError(f"Nothing fits. {obstacle}", fix=SMALLER)
    if not space.moves():
        raise ConfigError(
            f"There is nothing to tune here in {', '.join(only)}.",
            fix="Name other parts with --only, or set speedups=auto.",
        )
    if "batch" in only and (batch.rows_per_device != "auto" or batch.accumulate):
        progress.say(
            f"The recipe sets {start.rows} rows per micro-batch. `tune` varies the rows "
            "and the accumulation, and keeps the tokens per optimizer step."
        )
    timing = Timing(seconds=SECONDS, first_steps=LOSS_STEPS + 2, warmup_s=WARM_S)
    race = Race(
        partial(train, requested, timing),
        tolerance_between,
        total_s=(total_s := math.inf if minutes is None else 60 * minutes),
        longest_s=total_s / 2,
        began_s=start_s,
        ratio=over_the_run(resolved.config),
        draws=draws_of(resolved.config),
    )
    search = Search(race, start, space.moves(), partial(space.why_not, race),
                    always_trials=1, left=space.left)  # fmt: skip
    is_rehearsed = False
    with race.running(progress, "Tuning"):
        race.note("auto")
        if race.run(start).is_ok:
            race.longest_s = max(LONGEST_SHARE * total_s, 3 * race.expected_s(start))
            search.run()
            is_rehearsed = confirm(search, requested, resolved.config.data.seq_len)
    best = search.best
    if not race.results(best):
        race.done = [one for one in race.done if not one.result.is_ok]
        is_full = any(one.result.status == "out-of-memory" for one in race.done)
        race.require_result(SMALLER if is_full else "Try the same recipe with `flatout train`.")
    keys = best.keys() | {"parallel.replicate": requested.parallel.replicate}
    keys["train.precision"] = assemble(in_order(best.on)).precision.name
    config = resolved.config.with_values(keys)  # for any number of processes
    found = Tuning(
        **facts_of(race),
        recipe=requested.name,
        path=str(out),
        began=began,
        tokens_per_step=config.batch.tokens_per_step or 0,
        start=search.name(start),
        best=race.row(best, start if search.taken else None, name=search.name(best),
                      kind="best", speedups=in_order(best.on)),
        prefetch=config.data.prefetch,
        precision=config.train.precision,
        is_rehearsed=is_rehearsed,
        changes=search.rows(),
        not_tried=[*{each.name: each for each in search.left}.values()],
    )  # fmt: skip
    rehearsed = "Rehearsed with it: an evaluation and a save."
    use = f"{found.trials}; train it with: flatout train {in_shell(str(out))}"
    notes = [rehearsed if is_rehearsed else NOT_REHEARSED, *late_ones(search.left), use]
    found = found.model_copy(update={"notes": notes})
    comment = terminal_text(found.display(), COMMENT_COLUMNS)
    header = "\n".join(f"# {line}".rstrip() for line in comment.splitlines())
    write_text(out, f"{MARK} on {began[:10]}.\n{header}\n\n{dump_yaml(config.to_dict())}")
    remember(found.changes, found, resolved, cache, progress)
    return found


@dataclass(frozen=True)
class Space:
    """Where the search starts, and where it can go."""

    start: Setting
    only: Collection[str]
    """The parts and speedups to tune."""
    known: Sequence[Move]
    """The moves that change speedups or the steps ahead, the most promising ones first."""
    left: list[Row]
    """What is not measured."""
    row_counts: Sequence[int]
    """Rows to choose from, about twice as many each time. All divide the step."""
    obstacle: Callable[[Setting], str | None]
    """Returns why a setting cannot fit into memory, None when it may."""

    def moves(self) -> list[Move]:
        """Return the moves from the start, the most promising ones first.

        Among them are those to the next rows on either side, to the most rows that should fit, and
        to activation checkpointing with the larger micro-batch that then fits.
        """
        if "batch" not in self.only:
            return [*self.known]
        here, most = self.row_counts.index(self.start.rows), self.most_rows(self.start)
        up, down = self.row_counts[here + 1 :], self.row_counts[:here][::-1]
        jump = [most] if most > self.start.rows and most not in up[:1] else []
        found = [
            move
            for move in map(rows_move, (up, down, jump))
            if move and not self.obstacle(self.start.but(move.values))
        ]
        for move in self.known:
            after = move.apply(self.start) if move.part == "checkpointing" else None
            room = self.most_rows(after) if after else 0
            if room > max(most, 1):
                name = f"{move.name}, {ROWS}={room}"
                found.append(replace(move, name=name, values={ROWS: room}, speedup=None))
        return [*found, *self.known]

    def most_rows(self, setting: Setting) -> int:
        """Return the most rows with which a setting fits by estimate, 0 without any."""
        fitting = [n for n in self.row_counts if not self.obstacle(setting.but({ROWS: n}))]
        return max(fitting, default=0)

    def why_not(self, race: Race, after: Setting) -> str | None:
        """Return why a setting is not worth a measurement. None: it is."""
        first = race.done[0].result
        is_ahead = any(key == AHEAD for key, _ in after.values - self.start.values)
        if is_ahead and first.data_ms is not None and first.is_ok:
            share = first.data_ms / first.step_ms
            if share < DATA_WAIT:
                return f"not tried: waiting for data takes {share:.1%} of a step."
        for one in race.done:
            other = one.setting
            assert isinstance(other, Setting)
            is_smaller = other.on == after.on and other.rows <= after.rows
            if is_smaller and one.result.status == "out-of-memory":
                return f"not tried: {other.rows} rows ran out of memory."
        return self.obstacle(after)


def rows_move(counts: Sequence[int]) -> Move | None:
    """Return the move to the first of some numbers of rows, and from there on to the next."""
    if not counts:
        return None
    return Move(
        f"{ROWS}={counts[0]}", values={ROWS: counts[0]}, part="batch", then=rows_move(counts[1:])
    )


def space_of(
    requested: RunConfig,
    resolved: Resolved,
    only: Collection[str] = PARTS,
    *,
    statistical: bool = False,
) -> Space:
    """Return the settings that can be reached from what `auto` chose.

    A speedup that is off is added, one that is on is removed. Speedups that the request names or
    excludes stay as they are. One with a statistical tolerance is tried only when `statistical`.
    """
    config, start, request = (
        resolved.config,
        setting_of(resolved),
        parse_request(requested.speedups),
    )
    chooser, ahead = {*speedups_for("most_rows")}, config.data.prefetch
    moves, left = list[Move](), list[Row]()
    for point in ablation(requested, resolved) if request.auto else ():
        name, why_not, on = point.speedup, point.why_not, point.after.on - chooser
        if name is None or point.kind == "added" or name in chooser or name in request.named:
            continue
        sets = speedup_named(name).sets
        part = "checkpointing" if "activations" in sets else "speedups"
        if not {name, part} & {*only}:
            continue
        adds, drops = on - start.on, start.on - on
        kinds = {speedup_named(one).tolerance.kind for one in adds}
        if "state_saver" in sets:
            why_not = "not tried: a trial does not time saves."
        elif "statistical" in kinds and not statistical:
            why_not = "not tried: its tolerance is statistical. Add --statistical to try it."
        if why_not:
            left.append(absent_row(name, why_not))
        else:
            moves.append(SpeedupMove(point.name, adds, drops, part=part, speedup=name))
    if "prefetch" in only and start.on & {*speedups_for("loader")}:
        for each in sorted({max(ahead // 2, 1), 2 * ahead} - {ahead}):
            moves.append(Move(f"{AHEAD}={each}", values={AHEAD: each}, part="prefetch"))
    moves.sort(key=lambda move: (PARTS.index(move.part), move.leaves_out))
    counts = rows_to_try(start.rows, sequences_of(config))
    return Space(start, only, moves, left, counts, memory_obstacle(resolved))


def over_the_run(config: RunConfig) -> Callable[[Result, Result], float]:
    """Return how many times faster a run ends, its compilation included, as a function."""
    steps = max(config.train.steps or 1, 1)

    def ratio(one: Result, other: Result) -> float:
        if not (one.compile_s or other.compile_s):
            return one.times_as_fast(other)
        ours, theirs = (
            steps * each.step_ms + 1e3 * (each.compile_s or 0.0) for each in (one, other)
        )
        return theirs / ours

    return ratio


def confirm(search: Search, requested: RunConfig, seq_len: int) -> bool:
    """Race the best setting against the start, and evaluate and save with it.

    A setting that fails, or is not faster than the start after all, gives way to the one before it.
    Returns whether an evaluation and a save were rehearsed.
    """
    race = search.race
    while True:
        best = search.best
        if len(search.taken) > 1:
            race.note(f"{search.name(best)} beside {search.name(search.start)}")
            why = race.compare(best, search.start, least=1.0, rounds=3, reserve=1)
            gain = race.gain(best, search.start)
            is_slower = gain is not None and gain.high is not None and gain.high <= 1
            if race.failure(best) or is_slower:
                search.give_up(search.taken[-1], why or "slower in the end")
                continue
        if race.left_s < race.expected_s(best):
            return False
        race.note(f"an evaluation and a save with {search.name(best)}")
        limit_s = min(race.left_s, race.longest_s)
        tokens = {"train.eval_every": 1, "train.eval_tokens": best.rows * seq_len}
        saves = {"checkpoint.every_minutes": None, "checkpoint.every_steps": 1}
        timing = Timing(steps=2, warmup_steps=0)
        result = train(requested, timing, best, 0, limit_s, **tokens, **saves)
        if result.is_ok or result.status == "timed-out":
            return result.is_ok
        if search.taken:
            search.give_up(search.taken[-1], f"fails when it evaluates and saves: {result.reason}")
            continue
        race.done = [replace(one, result=result) for one in race.done]
        return False
