"""The settings of a recipe that are measured, and the moves from one to another.

A setting is a micro-batch, a number of steps to read ahead, and a set of speedups. The tokens per
optimizer step never change, so the number of micro-batches follows from the rows. `bench` adds
speedups and leaves them out, one at a time. `tune` starts from what `auto` chose.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flatout.assembly.memory import USED_MEMORY, estimate
from flatout.assembly.prediction import GIB
from flatout.assembly.recipe import Tolerance, divisors
from flatout.assembly.resolve import workload_of
from flatout.assembly.selection import all_speedups, assemble, parse_request, speedup_named
from flatout.config.registry import SPEEDUPS
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError
from flatout.measure.race import Race
from flatout.measure.resolving import Resolved
from flatout.measure.results import PARTS, Left

BASELINE = "baseline"
STRICTNESS = ("exact", "rounding", "statistical")
TRIED_MEMORY = 1.2
"""Share of a GPU's memory that the estimate of a trial may need: a compiled model keeps less than
the estimate, which is for eager mode, and a trial that runs out of memory harms nothing.
"""
DATA_WAIT = 0.01
"""Share of a step. Reading ahead is tuned where waiting for data takes more."""
NOT_TIMED = {"state_saver"}
"""Slots whose effect the steps of a trial do not show."""


@dataclass(frozen=True)
class Flip:
    """A set of speedups that differs from another one, by its name, in a single speedup."""

    name: str
    kind: str
    """baseline, added (one more than the set before), leave-one-out or add-one (from or to the full
    set)."""
    speedups: tuple[str, ...] = ()
    """All that are on."""
    speedup: str | None = None
    """The one that it is about."""
    against: str | None = None
    """The set that it is compared with."""
    why_not: str | None = None
    """Why it is not measured. None: it is."""


def flips(requested: RunConfig, resolved: Resolved) -> list[Flip]:
    """Return the baseline, each speedup added to those before it up to the full set, each left out
    of that, and each that is off added to it.

    A speedup that is off is added if `speedups` leaves the choice to auto and does not drop it.
    """
    full = in_order(resolved.speedups)
    found = [Flip(BASELINE, "baseline")]
    for count, name in enumerate(full, 1):
        on = tuple(full[:count])
        found.append(Flip(f"+ {name}", "added", on, name, found[-1].name))
    top = found[-1].name
    for name in full:
        gone = needing({name}, full)
        rest = tuple(other for other in full if other not in gone)
        found.append(Flip(f"all but {name}", "leave-one-out", rest, name, top))
    request, precision = parse_request(requested.speedups), requested.train.precision
    absent: list[Flip] = []
    for decision in resolved.decisions:
        name, added = decision.name, resolved.additions.get(decision.name, ())
        if decision.on or not request.auto:  # what is on is stated
            continue
        why_not = None
        if isinstance(added, str):
            why_not = added
        elif name in request.dropped:
            why_not = f"not measured: {decision.reason}."
        elif precision != "auto" and "precision" in SPEEDUPS.get(name).fills:
            why_not = f"not measured: train.precision={precision} is set."
        if why_not is not None:
            absent.append(Flip(name, "absent", speedup=name, why_not=why_not))
            continue
        on = tuple(in_order(added))
        title = " and ".join([name, *(one for one in on if one not in full and one != name)])
        replaced = " and ".join(one for one in full if one not in on)
        title = f"all, with {title} for {replaced}" if replaced else f"all and {title}"
        found.append(Flip(title, "add-one", on, name, top))
    return found + absent


def with_speedups(names: Iterable[str]) -> dict[str, Any]:
    """Return the configuration keys that switch on exactly these speedups, precisions included."""
    return {"speedups": list(names) or "none", "train.precision": "auto"}


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in the order of `all_speedups`, each after the ones that it needs."""
    wanted = list(names)
    order = [speedup.name for speedup in all_speedups(wanted)]
    wanted.sort(key=order.index)
    placed: list[str] = []
    while wanted:
        ready = next(name for name in wanted if not {*wanted} & {*speedup_named(name).needs})
        placed.append(ready)
        wanted.remove(ready)
    return placed


def needing(names: Collection[str], among: Iterable[str]) -> set[str]:
    """Return `names`, and those `among` that need one of them, directly or not."""
    found, among = set(names), list(among)
    while more := {
        name for name in among if name not in found and found & set(speedup_named(name).needs)
    }:
        found |= more
    return found


def filling(slot: str) -> list[str]:
    """Return the speedups that fill a slot, in the order of `all_speedups`."""
    return [speedup.name for speedup in all_speedups() if slot in speedup.fills]


def tolerance_between(one: Iterable[str], other: Iterable[str]) -> Tolerance:
    """Return the tolerance between the losses of two sets: the loosest of the unshared speedups.

    Rounding tolerances add up, and include the largest one of the shared speedups: a difference in
    the last bit of fp32 flips some later roundings to bfloat16, and the losses differ by those.
    """
    shared, unshared = set(one) & set(other), set(one) ^ set(other)
    tolerances = [SPEEDUPS.get(name).tolerance for name in unshared]
    loosest = max(tolerances, key=lambda p: STRICTNESS.index(p.kind), default=Tolerance.exact())
    kind = loosest.kind
    amplified = (SPEEDUPS.get(name).tolerance.rtol for name in shared if kind == "rounding")
    return Tolerance(
        kind, sum(tolerance.rtol for tolerance in tolerances) + max(amplified, default=0.0)
    )


@dataclass(frozen=True)
class Setting:
    """One way to run the recipe."""

    rows: int
    """Sequences per micro-batch."""
    prefetch: int
    """Optimizer steps that the data loader reads ahead."""
    speedups: frozenset[str]
    """Those that are on, without those that choose the micro-batch."""

    def values(self, tokens_per_step: int) -> dict[str, Any]:
        """Return the configuration keys of the setting."""
        return {
            "batch.tokens_per_step": tokens_per_step,
            "batch.rows_per_device": self.rows,
            "batch.accumulate": None,
            "data.prefetch": self.prefetch,
        } | with_speedups(in_order(sorted(self.speedups)))


def setting_of(resolved: Resolved) -> Setting:
    """Return the setting that `auto` chose."""
    config, chooser = resolved.config, {*filling("micro_batch")}
    on = frozenset(resolved.speedups) - chooser
    return Setting(int(config.batch.rows_per_device), config.data.prefetch, on)


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
    does: str = ""

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


Obstacle = Callable[[Setting], str | None]
"""Returns why a setting cannot fit into memory, None when it may."""


@dataclass(frozen=True)
class Space:
    """Where the search starts, and where it can go."""

    start: Setting
    """What `auto` chooses."""
    only: tuple[str, ...]
    """The parts and speedups to tune."""
    known: tuple[Move, ...]
    """The moves that change speedups or the steps ahead, the most promising ones first."""
    left: tuple[Left, ...]
    """What is not measured."""
    row_counts: tuple[int, ...]
    """Rows to choose from, about twice as many each time. All divide the step."""
    obstacle: Obstacle

    def moves(self, setting: Setting) -> list[Move]:
        """Return the moves from a setting, the most promising ones first.

        Among them are those to the next rows on either side, to the most rows that should fit, and
        to activation checkpointing with the larger micro-batch that then fits.
        """
        if "batch" not in self.only:
            return list(self.known)
        here, most = self.row_counts.index(setting.rows), self.most_rows(setting)
        wanted = (*self.row_counts[here + 1 : here + 2], *self.row_counts[:here][-1:], most)
        found = [
            rows_move(rows)
            for rows in dict.fromkeys(wanted)
            if rows not in (0, setting.rows) and not self.obstacle(replace(setting, rows=rows))
        ]
        for move in self.known:
            after = move.apply(setting) if move.part == "checkpointing" else None
            room = self.most_rows(after) if after else 0
            if room > max(most, 1):
                name = f"{move.name}, {rows_move(room).name}"
                found.append(replace(move, name=name, rows=room, speedup=None))
        return [*found, *self.known]

    def most_rows(self, setting: Setting) -> int:
        """Return the most rows with which a setting fits by estimate, 0 without any."""
        return max(
            (each for each in self.row_counts if not self.obstacle(replace(setting, rows=each))),
            default=0,
        )

    def further(self, before: Setting, after: Setting) -> Move | None:
        """Return the move to the next rows in the direction of an earlier move, None at the end."""
        step = (after.rows > before.rows) - (after.rows < before.rows)
        index = self.row_counts.index(after.rows) + step
        if "batch" not in self.only or not step or not 0 <= index < len(self.row_counts):
            return None
        return rows_move(self.row_counts[index])

    def instead(self, is_out_of_memory: bool) -> list[Setting]:
        """Return what to start from where the start cannot run, the nearest first.

        These have fewer rows while memory is short, otherwise one speedup less. Where one row is
        too many, activation checkpointing may make room.
        """
        moves, least = [move for move in self.known if move.is_leaving_out], self.start
        found = []
        if is_out_of_memory:
            fewer = [rows for rows in self.row_counts if rows < self.start.rows]
            found = [replace(self.start, rows=rows) for rows in reversed(fewer)]
            moves = [move for move in self.known if move.part == "checkpointing"]
            least = replace(self.start, rows=self.row_counts[0])
        return found + [after for move in moves if (after := move.apply(least))]

    def name(self, setting: Setting) -> str:
        """Return the setting's name: how it differs from what `auto` chose."""
        start = self.start
        parts = [
            *([f"rows {setting.rows}"] if setting.rows != start.rows else []),
            *([f"prefetch {setting.prefetch}"] if setting.prefetch != start.prefetch else []),
            *(f"+ {name}" for name in sorted(setting.speedups - start.speedups)),
            *(f"- {name}" for name in sorted(start.speedups - setting.speedups)),
        ]
        return ", ".join(parts) or "auto"

    def why_not(self, after: Setting, race: Race[Setting]) -> str | None:
        """Return why a setting is not worth a measurement. None: it is."""
        first = race.done[0].result
        if after.prefetch != self.start.prefetch and first.data_ms is not None and first.is_ok:
            share = first.data_ms / first.step_ms
            if share < DATA_WAIT:
                return f"not tried: waiting for data takes {share:.1%} of a step."
        for one in race.done:
            is_smaller = one.setting.speedups == after.speedups and one.setting.rows <= after.rows
            if is_smaller and one.result.status == "out-of-memory":
                return f"not tried: {one.setting.rows} rows ran out of memory."
        return self.obstacle(after)

    def tolerance(self, one: Setting, other: Setting) -> Tolerance:
        """Return the tolerance between the losses of two settings.

        Other rows per micro-batch add the tolerance of the speedup that chooses them.
        """
        rows = set(filling("micro_batch")) if one.rows != other.rows else set()
        return tolerance_between(one.speedups | rows, other.speedups)


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
    config, start, request = (
        resolved.config,
        setting_of(resolved),
        parse_request(requested.speedups),
    )
    rows, ahead = start.rows, start.prefetch
    chooser = {*filling("micro_batch")}
    moves: list[Move] = []
    left: list[Left] = []
    for flip in flips(requested, resolved) if request.auto else ():
        name, why_not, wanted = flip.speedup, flip.why_not, frozenset(flip.speedups) - chooser
        if name is None or flip.kind == "added" or name in chooser or name in request.named:
            continue
        fills = speedup_named(name).fills
        part = "checkpointing" if "activations" in fills else "speedups"
        if not {name, part} & {*only}:
            continue
        new, gone = wanted - start.speedups, start.speedups - wanted
        if NOT_TIMED & fills.keys():
            why_not = "not tried: a trial does not time saves."
        elif not statistical and "statistical" in (speedup_named(n).tolerance.kind for n in new):
            why_not = "not tried: its tolerance is statistical. Add --statistical to try it."
        if why_not:
            left.append(Left(name=name, reason=why_not))
            continue
        title = f"+ {flip.name.removeprefix('all, with ').removeprefix('all and ')}"
        title = f"- {name}" if flip.kind == "leave-one-out" else title
        moves.append(Move(title, part, adds=new, drops=gone, speedup=name))
    if "prefetch" in only and start.speedups & {*filling("loader")}:
        others = sorted({max(ahead // 2, 1), 2 * ahead} - {ahead})
        moves += [Move(f"data.prefetch={each}", "prefetch", prefetch=each) for each in others]
    moves.sort(key=lambda move: (PARTS.index(move.part), move.is_leaving_out))
    sequences = (config.batch.tokens_per_step or 0) // config.data.seq_len
    counts, obstacle = rows_to_try(rows, sequences), memory_obstacle(resolved)
    return Space(start, tuple(only), tuple(moves), tuple(left), counts, obstacle)


def rows_to_try(start: int, sequences: int) -> tuple[int, ...]:
    """Return the divisors of a step's sequences around `start`, each about twice the one before."""
    known = sorted(divisors(sequences, sequences))
    up, down = [start], [start]
    while up[-1] < known[-1]:
        up.append(next((rows for rows in known if rows >= 2 * up[-1]), known[-1]))
    while down[-1] > 1:
        down.append(max(rows for rows in known if 2 * rows <= down[-1]))
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
            recipe = assemble(in_order(sorted(setting.speedups)))
        except ConfigError as error:
            return error.what
        workload = workload_of(config, recipe)
        need = estimate(workload, setting.rows, max(sequences // setting.rows, 1)).total
        if need / GIB <= available:
            return None
        return f"It needs about {need / GIB:.1f} GiB by estimate, and {owner}."

    return obstacle
