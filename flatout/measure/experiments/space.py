"""The settings that `flatout tune` can choose from, and the moves from one to another.

A setting is a micro-batch, a number of steps to read ahead, and a set of speedups. The policy of
activation checkpointing is one of these speedups. The tokens per optimizer step never change, so
the number of micro-batches follows from the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flatout.assembly.memory import USED_MEMORY, estimate
from flatout.assembly.prediction import GIB
from flatout.assembly.recipe import divisors
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import assemble, parse_request, speedup_named
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError
from flatout.measure.experiments.points import filling, in_order, needing, plan_ablation
from flatout.measure.experiments.records import PARTS, Left
from flatout.measure.experiments.resolving import Resolved
from flatout.measure.experiments.schedule import with_speedups

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
    """Optimizer steps that the data loader reads ahead."""
    speedups: frozenset[str]

    def in_order(self) -> list[str]:
        """Return the speedups by rank, custom ones last."""
        return in_order(sorted(self.speedups))

    def values(self, tokens_per_step: int) -> dict[str, Any]:
        """Return the configuration keys of the setting."""
        return {
            "batch.tokens_per_step": tokens_per_step,
            "batch.rows_per_device": self.rows,
            "batch.accumulate": None,
            "data.prefetch": self.prefetch,
        } | with_speedups(self.in_order())


Obstacle = Callable[[Setting], str | None]
"""Returns why a setting cannot fit into memory, None when it may."""


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
        """Whether it only removes speedups."""
        return bool(self.drops) and not self.adds

    def apply(self, setting: Setting) -> Setting | None:
        """Return the changed setting. None when it would lack something that a speedup needs.

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
class Space:
    """Where the search starts, and where it can go."""

    start: Setting
    """What `auto` chooses."""
    only: tuple[str, ...]
    """The parts and speedups to tune."""
    moves: tuple[Move, ...]
    """The moves that change speedups or the steps ahead, the most promising ones first."""
    left: tuple[Left, ...]
    row_counts: tuple[int, ...]
    """Rows to choose from, about twice as many each time. All divide the step."""
    obstacle: Obstacle

    def moves_from(self, setting: Setting) -> list[Move]:
        """Return the first moves to measure from a setting, the most promising ones first.

        Among them are the moves to the next rows on either side, and to the most rows that should
        fit.
        """
        if "batch" not in self.only:
            return list(self.moves)
        here, most = self.row_counts.index(setting.rows), self.most_rows(setting)
        wanted = (*self.row_counts[here + 1 : here + 2], *self.row_counts[:here][-1:], most)
        batch = [
            rows_move(rows)
            for rows in dict.fromkeys(wanted)
            if rows not in (0, setting.rows) and not self.obstacle(replace(setting, rows=rows))
        ]
        grown = [larger for move in self.moves if (larger := self.with_room(move, setting))]
        return [*batch, *grown, *self.moves]

    def most_rows(self, setting: Setting) -> int:
        """Return the most rows with which a setting fits by estimate, 0 without any."""
        fitting = (
            rows for rows in self.row_counts if not self.obstacle(replace(setting, rows=rows))
        )
        return max(fitting, default=0)

    def with_room(self, move: Move, setting: Setting) -> Move | None:
        """Return a move to activation checkpointing, with the larger micro-batch that then fits.

        None for other moves, and where memory does not limit the rows.
        """
        after = move.apply(setting) if move.part == "checkpointing" else None
        most = self.most_rows(after) if after else 0
        if most <= max(self.most_rows(setting), 1):
            return None
        return replace(move, name=f"{move.name}, {rows_move(most).name}", rows=most, speedup=None)

    def further(self, before: Setting, after: Setting) -> Move | None:
        """Return the move to the next rows in the direction of an earlier move, None at the end."""
        step = (after.rows > before.rows) - (after.rows < before.rows)
        index = self.row_counts.index(after.rows) + step
        if "batch" not in self.only or not step or not 0 <= index < len(self.row_counts):
            return None
        return rows_move(self.row_counts[index])


def rows_move(rows: int) -> Move:
    """Return the move to a micro-batch of `rows`."""
    return Move(f"batch.rows_per_device={rows}", "batch", rows=rows)


def make_space(
    requested: RunConfig,
    resolved: Resolved,
    *,
    only: Sequence[str] = PARTS,
    statistical: bool = False,
) -> Space:
    """Return the settings that can be reached from what `auto` chose.

    A speedup that is off is added, one that is on is removed. Speedups that the request names or
    excludes stay as they are. One with a statistical tolerance is tried only when `statistical`.
    """
    config, chooser = resolved.config, {*filling("micro_batch")}
    rows, ahead = int(config.batch.rows_per_device), config.data.prefetch
    start = Setting(rows, ahead, frozenset(resolved.speedups) - chooser)
    request = parse_request(requested.speedups)
    moves: list[Move] = []
    left: list[Left] = []
    for row in plan_ablation(requested, resolved.decisions, resolved.additions):
        name = row.speedup
        if name is None or row.kind == "added" or name in chooser:
            continue
        fills = speedup_named(name).fills
        part = "checkpointing" if "activations" in fills else "speedups"
        is_stated = name in request.named or not request.auto
        if is_stated or not {name, part} & {*only}:
            continue
        wanted, why_not = frozenset(row.speedups) - chooser, row.reason
        new, gone = wanted - start.speedups, start.speedups - wanted
        kinds = {speedup_named(one).tolerance.kind for one in new}
        if NOT_TIMED & fills.keys():
            why_not = "not tried: a trial does not time saves."
        elif "statistical" in kinds and not statistical:
            why_not = "not tried: its tolerance is statistical. Add --statistical to try it."
        if why_not:
            left.append(Left(name=name, reason=why_not))
            continue
        title = f"+ {row.short_name.removeprefix('all and ')}"
        if row.kind == "leave-one-out":
            title = f"- {name}"
        moves.append(Move(title, part, adds=new, drops=gone, speedup=name))
    if "prefetch" in only and start.speedups & {*filling("loader")}:
        others = sorted({max(ahead // 2, 1), 2 * ahead} - {ahead})
        moves += [Move(f"data.prefetch={each}", "prefetch", prefetch=each) for each in others]
    moves.sort(key=lambda move: (PARTS.index(move.part), move.is_leaving_out))
    sequences = (config.batch.tokens_per_step or 0) // config.data.seq_len
    row_counts = rows_to_try(rows, sequences)
    obstacle = memory_obstacle(resolved)
    return Space(start, tuple(only), tuple(moves), tuple(left), row_counts, obstacle)


def rows_to_try(start: int, sequences: int) -> tuple[int, ...]:
    """Return the divisors of a step's sequences around `start`, each about twice the one before."""
    known = [*divisors(sequences, sequences)][::-1]
    up, down = [start], [start]
    while larger := [rows for rows in known if rows > up[-1]]:
        up.append(next((rows for rows in larger if rows >= 2 * up[-1]), larger[-1]))
    while smaller := [rows for rows in known if rows < down[-1]]:
        down.append(next((rows for rows in smaller[::-1] if 2 * rows <= down[-1]), smaller[0]))
    return (*down[:0:-1], *up)


def memory_obstacle(resolved: Resolved) -> Obstacle:
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
