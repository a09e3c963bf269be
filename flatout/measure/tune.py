"""Finds the fastest setting of a recipe on this machine in bounded time, and writes it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from flatout.assembly.batch import sequences_of
from flatout.assembly.choices import assemble, parse_request, speedup_named, speedups_for
from flatout.assembly.resolve import tokens_per_step
from flatout.config.documents import dump_yaml
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset
from flatout.display import terminal_text
from flatout.errors import ConfigError, HardwareError, in_shell
from flatout.measure.bench import race_of, remember
from flatout.measure.moves import (
    ROWS,
    Move,
    Setting,
    SpeedupMove,
    ablation,
    in_order,
    memory_obstacle,
    rows_to_try,
    setting_of,
)
from flatout.measure.output import require_own
from flatout.measure.race import Row, absent_row
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
COMMENT_COLUMNS = 98
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
    start_s = time.monotonic()
    require_one_process("tune")
    require_own(out, is_own=out.is_file() and out.read_bytes().startswith(MARK.encode()))
    resolved = resolve_apart(requested, cache, progress)
    start, obstacle, batch = setting_of(resolved), memory_obstacle(resolved), requested.batch
    if why := obstacle(start):
        raise HardwareError(f"Nothing fits. {why}", fix=SMALLER)
    moves, left = moves_of(requested, resolved, only, obstacle, statistical=statistical)
    if not moves:
        raise ConfigError(
            f"There is nothing to tune here in {', '.join(only)}.",
            fix="Name other parts with --only, or set speedups=auto.",
        )
    if "batch" in only and (batch.rows_per_device != "auto" or batch.accumulate):
        progress.say(
            f"The recipe sets {start.rows} rows per micro-batch. `tune` varies the rows "
            "and the accumulation, and keeps the tokens per optimizer step."
        )
    total_s = math.inf if minutes is None else 60 * minutes
    race = race_of(requested, SECONDS, total_s=total_s, longest_s=total_s / 2, began_s=start_s,
                   ratio=over_the_run(resolved.config, resolved.dataset),
                   name=lambda setting: setting.beyond(start) or "auto")  # fmt: skip

    def why_not(after: Setting) -> str | None:
        """Return why a setting is not worth a measurement. None: it is."""
        first = race.done[0].result
        for one in race.done:
            rows = one.setting.rows
            is_between = (rows - start.rows) * (after.rows - rows) > 0
            if one.setting.on != after.on:
                continue
            if rows <= after.rows and one.result.status == "out-of-memory":
                return f"not tried: {rows} rows ran out of memory."
            if is_between and race.results(one.setting) and race.ratio(one.result, first) < 1:
                return f"not tried: {rows} rows are slower."
        return None

    search = Search(race, start, moves, why_not, left=left)
    with race.running(progress, "Tuning"):
        if race.run(start).is_ok:
            race.longest_s = max(LONGEST_SHARE * total_s, 3 * race.expected_s(start))
            search.run()
            confirm(search)
    best = search.best
    if not race.results(best):
        is_full = any(one.result.status == "out-of-memory" for one in race.done)
        race.require_result(SMALLER if is_full else "Try the same recipe with `flatout train`.")
    keys = best.keys() | {"parallel.replicate": requested.parallel.replicate}
    keys["train.precision"] = assemble(in_order(best.on)).precision.name
    config = resolved.config.with_values(keys)  # for any number of processes
    found = Tuning(
        **facts_of(race),
        recipe=requested.name,
        path=str(out),
        tokens_per_step=config.batch.tokens_per_step or 0,
        best=race.row(best, start if search.taken else None, name=race.name(best),
                      kind="best", speedups=in_order(best.on)),
        precision=config.train.precision,
        changes=search.rows(),
        not_tried=[*{each.name: each for each in search.left}.values()],
    )  # fmt: skip
    use = f"{found.trials}; train it with: flatout train {in_shell(str(out))}"
    found = found.model_copy(update={"notes": [*late_ones(search.left), use]})
    comment = terminal_text(found.display(), COMMENT_COLUMNS)
    header = "\n".join(f"# {line}".rstrip() for line in comment.splitlines())
    write_text(out, f"{MARK} on {race.began[:10]}.\n{header}\n\n{dump_yaml(config.to_dict())}")
    race.ratio = Result.times_as_fast  # `auto` weighs what compiling takes against each run
    remember(search.rows(), found, resolved, cache, progress)
    return found


def moves_of(
    requested: RunConfig,
    resolved: Resolved,
    only: Collection[str],
    obstacle: Callable[[Setting], str | None],
    *,
    statistical: bool = False,
) -> tuple[list[Move], list[Row]]:
    """Return the moves from what `auto` chose, the most promising ones first, and what is left out.

    The nearest rows come first, of those that fit. A speedup that is off is added, one
    that is on is removed, and activation checkpointing also comes with the larger micro-batch that
    then fits. Speedups that the request names or excludes stay as they are. One with a statistical
    tolerance is tried only when `statistical`.
    """
    start, request = setting_of(resolved), parse_request(requested.speedups)
    chooser, moves, left = {*speedups_for("most_rows")}, list[Move](), list[Row]()
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
    if "batch" in only:
        counts = rows_to_try(start.rows, sequences_of(resolved.config))

        def fitting(setting: Setting) -> list[int]:
            return [rows for rows in counts if not obstacle(setting.but({ROWS: rows}))]

        others = [rows for rows in fitting(start) if rows != start.rows]
        others.sort(key=lambda rows: abs(math.log(rows / start.rows)))
        batches = [Move(f"{ROWS}={n}", values={ROWS: n}, part="batch") for n in others]
        for move in [move for move in moves if move.part == "checkpointing"]:
            room = max(fitting(move.apply(start) or start), default=0)
            if room > max([start.rows, *others]):
                name = f"{move.name}, {ROWS}={room}"
                batches.append(replace(move, name=name, values={ROWS: room}, speedup=None))
        moves += batches
    moves = [move for move in moves if not obstacle(move.apply(start) or start)]
    moves.sort(key=lambda move: (PARTS.index(move.part), move.leaves_out))
    return moves, left


def over_the_run(
    config: RunConfig, dataset: AnyDataset | None
) -> Callable[[Result, Result], float]:
    """Return how many times faster a run ends, its compilation included, as a function."""
    tokens = (config.train.steps or 1) * tokens_per_step(config, dataset)

    def ratio(one: Result, other: Result) -> float:
        if not (one.compile_s or other.compile_s):
            return one.times_as_fast(other)
        ours, theirs = (
            tokens / each.rate(each.measured) + (each.compile_s or 0.0) for each in (one, other)
        )
        return theirs / ours

    return ratio


def confirm(search: Search) -> None:
    """Race the best setting against the start.

    While it fails, or is not faster after all, the last change gives way.
    """
    race = search.race
    while len(search.taken) > 1:
        why = race.compare(search.best, search.start, least=1.0, rounds=3)
        gain = race.gain(search.best, search.start)
        is_slower = gain is not None and gain.high is not None and gain.high <= 1
        if not (race.failure(search.best) or is_slower):
            return
        search.give_up(search.taken[-1], why or "slower in the end")
