"""The settings that `flatout tune` can choose from, and the moves from one to another.

A setting is a micro-batch, a number of steps to read ahead, and a set of speedups; the policy of
activation checkpointing is one of these speedups. The tokens per optimizer step never change, so
the number of micro-batches follows from the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flatout.assembly.memory import USED_MEMORY, estimate
from flatout.assembly.prediction import GIB
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import (
    Decision,
    all_speedups,
    assemble,
    parse_request,
    speedup_named,
)
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError
from flatout.measure.trials.ladder import reason_to_leave
from flatout.measure.trials.resolving import Resolved
from flatout.measure.trials.rounds import with_speedups
from flatout.measure.trials.sweep import filling
from flatout.measure.tune.parts import PARTS

TRIED_MEMORY = 1.2
"""Share of a GPU's memory that the estimate of a trial may need: a compiled model keeps less than
the estimate, which is for eager mode, and a trial that runs out of memory harms nothing.
"""
NOT_TIMED = {"state_saver"}
"""Slots whose effect the steps of a trial do not show."""


@dataclass(frozen=True)
class Setting:
    """One way to run the recipe."""

    rows: int
    """Sequences per micro-batch."""
    prefetch: int
    """Optimizer steps that the feed reads ahead."""
    speedups: frozenset[str]

    def in_order(self) -> list[str]:
        """Return the speedups in the order of the ladder, custom ones last."""
        order = [speedup.name for speedup in all_speedups()]
        return sorted(
            self.speedups,
            key=lambda name: (order.index(name) if name in order else len(order), name),
        )

    def values(self, tokens_per_step: int) -> dict[str, Any]:
        """Return the configuration keys of the setting."""
        return {
            "batch.tokens_per_step": tokens_per_step,
            "batch.rows_per_device": self.rows,
            "batch.accumulate": None,
            "data.prefetch": self.prefetch,
        } | with_speedups(self.in_order())


@dataclass(frozen=True)
class Move:
    """One change of a setting."""

    name: str
    part: str
    """One of PARTS."""
    rows: int | None = None
    prefetch: int | None = None
    adds: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    speedup: str | None = None
    """The one speedup whose gain it measures, if that is all that it changes."""

    @property
    def is_leaving_out(self) -> bool:
        """Whether it only leaves out speedups."""
        return bool(self.drops) and not self.adds

    def apply(self, setting: Setting) -> Setting | None:
        """Return the changed setting; None when it would lack something that a speedup needs.

        Speedups that fill a slot of an added one make room for it.
        """
        slots = {slot for name in self.adds for slot in speedup_named(name).fills}
        rivals = {
            name
            for name in setting.speedups - self.adds
            if slots & speedup_named(name).fills.keys()
        }
        on = (setting.speedups - needing(self.drops | rivals, setting.speedups)) | self.adds
        if any(need not in on for name in on for need in speedup_named(name).needs):
            return None
        return Setting(self.rows or setting.rows, self.prefetch or setting.prefetch, on)


@dataclass(frozen=True)
class Left:
    """A change that is not tried."""

    name: str
    reason: str
    """Why, as a sentence."""


@dataclass(frozen=True)
class Space:
    """Where the search starts, and where it can go."""

    start: Setting
    """What `auto` chooses."""
    only: tuple[str, ...]
    """The parts and speedups to tune."""
    moves: tuple[Move, ...]
    """The moves that change speedups or the steps ahead, the most promising ones first."""
    left: tuple[Left, ...]
    ladder: tuple[int, ...]
    """Rows to choose from, about twice as many each time; all divide the step."""
    obstacle: Callable[[Setting], str | None]
    """Returns why a setting cannot fit into memory, None when it may."""

    def moves_from(self, setting: Setting) -> list[Move]:
        """Return the first moves to measure from a setting, the most promising ones first."""
        if "batch" not in self.only:
            return list(self.moves)
        rooms = (with_room(move, setting, self.ladder, self.obstacle) for move in self.moves)
        grown = [move for move in rooms if move]
        return [*batch_moves(setting, self.ladder, self.obstacle), *grown, *self.moves]

    def further(self, before: Setting, after: Setting) -> Move | None:
        """Return the move to the next rows in the direction of an earlier move, None at the end."""
        step = (after.rows > before.rows) - (after.rows < before.rows)
        index = self.ladder.index(after.rows) + step
        if "batch" not in self.only or not step or not 0 <= index < len(self.ladder):
            return None
        return rows_move(self.ladder[index])


def rows_move(rows: int) -> Move:
    """Return the move to a micro-batch of `rows`."""
    return Move(f"batch.rows_per_device={rows}", "batch", rows=rows)


def needing(names: Collection[str], among: Iterable[str]) -> set[str]:
    """Return `names`, and those `among` that need one of them, directly or not."""
    found, among = set(names), list(among)
    while more := {
        name for name in among if name not in found and found & set(speedup_named(name).needs)
    }:
        found |= more
    return found


def make_space(
    requested: RunConfig,
    resolved: Resolved,
    additions: Mapping[str, Sequence[str] | str],
    *,
    only: Sequence[str] = PARTS,
    statistical: bool = False,
) -> Space:
    """Return the settings that can be reached from what `auto` chose.

    Speedups that the request names or leaves out stay as they are. One with a statistical promise
    is tried only when `statistical`.
    """
    chooser = filling("micro_batch")
    config = resolved.config
    start = Setting(
        int(config.batch.rows_per_device),
        config.data.prefetch,
        frozenset(name for name in resolved.speedups if name not in chooser),
    )
    found = speedup_moves(requested, resolved, start, additions, statistical=statistical)
    wanted = [
        each
        for each in found
        if is_wanted((each.speedup if isinstance(each, Move) else each.name) or "", only)
    ]
    moves = [move for move in wanted if isinstance(move, Move)]
    moves += prefetch_moves(start) if "prefetch" in only else []
    moves.sort(key=lambda move: (PARTS.index(move.part), move.is_leaving_out))
    return Space(
        start,
        tuple(only),
        tuple(moves),
        tuple(move for move in wanted if isinstance(move, Left)),
        rows_ladder(start.rows, (config.batch.tokens_per_step or 0) // config.data.seq_len),
        memory_obstacle(resolved),
    )


def part_of(name: str) -> str:
    """Return the part that a speedup belongs to."""
    return "checkpointing" if "activations" in speedup_named(name).fills else "speedups"


def is_wanted(name: str, only: Sequence[str]) -> bool:
    """Return whether a speedup is to be tuned."""
    return name in only or part_of(name) in only


def rows_ladder(start: int, sequences: int) -> tuple[int, ...]:
    """Return the divisors of a step's sequences around `start`, each about twice the one before."""
    divisors = [rows for rows in range(1, sequences + 1) if sequences % rows == 0]
    up, down = [start], [start]
    while larger := [rows for rows in divisors if rows > up[-1]]:
        up.append(next((rows for rows in larger if rows >= 2 * up[-1]), larger[-1]))
    while smaller := [rows for rows in divisors if rows < down[-1]]:
        down.append(next((rows for rows in smaller[::-1] if 2 * rows <= down[-1]), smaller[0]))
    return (*down[:0:-1], *up)


def batch_moves(
    start: Setting, ladder: Sequence[int], obstacle: Callable[[Setting], str | None]
) -> list[Move]:
    """Return the moves to the next rows on either side, and to the most rows that should fit."""
    here = ladder.index(start.rows)
    wanted = [*ladder[here + 1 : here + 2], *ladder[:here][-1:]]
    most = largest_fitting(start, ladder, obstacle)
    if most is not None and most > start.rows:
        wanted.append(most)
    return [
        rows_move(rows)
        for rows in dict.fromkeys(wanted)
        if obstacle(replace(start, rows=rows)) is None
    ]


def largest_fitting(
    setting: Setting, ladder: Sequence[int], obstacle: Callable[[Setting], str | None]
) -> int | None:
    """Return the most rows of the ladder with which a setting fits by estimate, None without any.

    The need grows with the rows, so a bisection finds them.
    """
    low, high = 0, len(ladder)
    while low < high:
        middle = (low + high) // 2
        if obstacle(replace(setting, rows=ladder[middle])) is None:
            low = middle + 1
        else:
            high = middle
    return ladder[low - 1] if low else None


def with_room(
    move: Move, start: Setting, ladder: Sequence[int], obstacle: Callable[[Setting], str | None]
) -> Move | None:
    """Return a checkpointing move together with the larger micro-batch for which it makes room.

    None for other moves, and where memory does not limit the rows.
    """
    after = move.apply(start) if move.part == "checkpointing" else None
    if after is None or largest_fitting(start, ladder, obstacle) == ladder[-1]:
        return None
    before, most = (largest_fitting(each, ladder, obstacle) or 1 for each in (start, after))
    name = f"{move.name}, {rows_move(most).name}"
    return replace(move, name=name, rows=most, speedup=None) if most > before else None


def prefetch_moves(start: Setting) -> list[Move]:
    """Return the moves to half and twice the steps ahead; none without the speedup that reads."""
    if not start.speedups & set(filling("feed")):
        return []
    steps = sorted({max(start.prefetch // 2, 1), 2 * start.prefetch} - {start.prefetch})
    return [Move(f"data.prefetch={each}", "prefetch", prefetch=each) for each in steps]


def speedup_moves(
    requested: RunConfig,
    resolved: Resolved,
    start: Setting,
    additions: Mapping[str, Sequence[str] | str],
    *,
    statistical: bool,
) -> list[Move | Left]:
    """Return a move for each speedup that `auto` decided, or why it is not tried.

    A speedup that is off is added, one that is on is left out.
    """
    request, chooser = parse_request(requested.speedups), filling("micro_batch")
    found: list[Move | Left] = []
    for decision in resolved.decisions:
        name = decision.name
        if name in chooser or name in request.named or not request.auto:
            continue
        if NOT_TIMED & speedup_named(name).fills.keys():
            found.append(Left(name, "not tried: a trial does not time saves."))
        elif decision.on:
            drops = frozenset(needing({name}, (each.name for each in all_speedups())))
            found.append(Move(f"- {name}", part_of(name), drops=drops, speedup=name))
        else:
            found.append(_addition(decision, requested, start, additions, statistical))
    return found


def _addition(
    decision: Decision,
    requested: RunConfig,
    start: Setting,
    additions: Mapping[str, Sequence[str] | str],
    statistical: bool,
) -> Move | Left:
    name, added = decision.name, additions.get(decision.name, ())
    if isinstance(added, str):
        return Left(name, added)
    if why_not := reason_to_leave(decision, requested):
        return Left(name, why_not)
    wanted = frozenset(added) - {*filling("micro_batch")}
    new = wanted - start.speedups
    if not statistical and any(speedup_named(one).promise.kind == "statistical" for one in new):
        return Left(name, "not tried: its promise is statistical; --statistical tries it.")
    others, gone = sorted(new - {name}), sorted(start.speedups - wanted)
    title = f"+ {' and '.join([name, *others])}" + (f" for {' and '.join(gone)}" if gone else "")
    return Move(title, part_of(name), adds=new, drops=start.speedups - wanted, speedup=name)


def memory_obstacle(resolved: Resolved) -> Callable[[Setting], str | None]:
    """Return a function from a setting to why it cannot fit into memory by estimate, or None."""
    config, machine = resolved.config, resolved.machine
    sequences = (config.batch.tokens_per_step or 0) // config.data.seq_len
    kind, _, index = config.train.device.partition(":")
    if kind == "cuda" and machine.gpus:  # asking torch would create a context on the GPU
        gpu_gib = machine.gpus[int(index or 0)].memory_gib
        available, owner = TRIED_MEMORY * gpu_gib, f"the GPU has {gpu_gib:.1f} GiB"
    else:
        available = USED_MEMORY * machine.memory_gib
        owner = f"{available:.1f} of the machine's {machine.memory_gib:.1f} GiB are used at most"

    @cache
    def obstacle(setting: Setting) -> str | None:
        try:
            recipe = assemble(setting.in_order())
        except ConfigError as error:
            return error.what
        workload = workload_of(config, recipe)
        need = estimate(workload, setting.rows, max(sequences // setting.rows, 1)).total
        if need / GIB <= available:
            return None
        return f"It needs about {need / GIB:.1f} GiB by estimate, and {owner}."

    return obstacle
