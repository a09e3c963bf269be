"""What is measured: settings of a recipe or a script, and the moves from one to another.

A setting is what is on, the speedups of a recipe or the changes of a script, and the values of
other keys. `bench` adds speedups and leaves them out, one at a time; `tune` starts from what `auto`
chose. Of a recipe the tokens per optimizer step never change, except in sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from flatout.assembly.batch import sequences_of
from flatout.assembly.choices import (
    all_speedups,
    assemble,
    parse_request,
    speedup_named,
    speedups_for,
)
from flatout.assembly.memory import USED_MEMORY, estimate, workload_of
from flatout.assembly.parts import divisors
from flatout.assembly.speedup import Tolerance
from flatout.config.registry import SPEEDUPS
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError
from flatout.hardware.machine import GIB
from flatout.measure.resolving import Resolved

ROWS, TOKENS = "batch.rows_per_device", "batch.tokens_per_step"
STRICTNESS = ("exact", "rounding", "statistical")
TRIED_MEMORY = 1.2
"""Share of a GPU's memory that the estimate of a trial may need: a compiled model keeps less than
the estimate, which is for eager mode, and a trial that runs out of memory harms nothing.
"""


@dataclass(frozen=True)
class Setting:
    """One way to run a recipe or a script."""

    on: frozenset[str] = frozenset()
    """The speedups of a recipe, or the changes of a script."""
    values: frozenset[tuple[str, Any]] = frozenset()
    """Other keys of a recipe, with their values."""

    @property
    def rows(self) -> int:
        """The sequences per micro-batch."""
        return int(dict(self.values)[ROWS])

    def but(self, values: Mapping[str, Any]) -> Setting:
        """Return the setting with other values."""
        return replace(self, values=frozenset((dict(self.values) | dict(values)).items()))

    def keys(self) -> dict[str, Any]:
        """Return the configuration keys that make exactly this setting, precisions included."""
        speedups = in_order(self.on) or "none"
        return {"speedups": speedups, "train.precision": "auto", **dict(self.values)}

    def beyond(self, start: Setting) -> str:
        """Return how it differs from another one. Empty: it does not."""
        return ", ".join([
            *(f"{key}={value}" for key, value in sorted(self.values - start.values)),
            *(f"+ {name}" for name in sorted(self.on - start.on)),
            *(f"- {name}" for name in sorted(start.on - self.on)),
        ])  # fmt: skip


@dataclass(frozen=True)
class Move:
    """One change of a setting."""

    name: str
    adds: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    values: Mapping[str, Any] = field(default_factory=dict)
    part: str = "speedups"
    """The part of `tune --only` that it belongs to."""
    speedup: str | None = None
    """The one speedup whose gain it measures, if that is all that it changes."""
    does: str = ""
    """What it does, in a few words."""

    @property
    def leaves_out(self) -> bool:
        """Whether it only removes something, which is taken too if that breaks the losses."""
        return bool(self.drops) and not self.adds

    def apply(self, setting: Setting) -> Setting | None:
        """Return the changed setting."""
        return Setting((setting.on - self.drops) | self.adds, setting.but(self.values).values)


@dataclass(frozen=True)
class SpeedupMove(Move):
    """A change of a recipe, in which speedups exclude and need each other."""

    def apply(self, setting: Setting) -> Setting | None:
        """Return the changed setting. None when it would lack something that a speedup needs.

        Speedups that set a part of an added one make room for it.
        """
        sets = {part for name in self.adds for part in speedup_named(name).sets}
        rivals = {n for n in setting.on - self.adds if sets & speedup_named(n).sets}
        gone = needing(self.drops | rivals, setting.on)
        after = Setting((setting.on - gone) | self.adds, setting.but(self.values).values)
        needed = {need for name in after.on for need in speedup_named(name).needs}
        return after if needed <= after.on else None


class Point(NamedTuple):
    """What a row of a bench measures, and what it is compared with."""

    name: str
    kind: str
    """As that of a `Row`."""
    after: Setting
    before: Setting | None = None
    speedup: str | None = None
    why_not: str | None = None
    """Why it is not measured. None: it is."""


def ablation(requested: RunConfig, resolved: Resolved) -> list[Point]:
    """Return the baseline, each speedup added to those before it up to the full set, each left out
    of that, and each that is off added to it.

    A speedup that is off is added if `speedups` leaves the choice to auto and does not drop it.
    """
    full, at = in_order(resolved.speedups), Setting()
    points = [Point("baseline", "baseline", at)]
    for name in full:
        after = Setting(at.on | {name})
        points.append(Point(f"+ {name}", "added", after, at, name))
        at = after
    for name in full:
        without = Setting(at.on - needing({name}, full))
        points.append(Point(f"- {name}", "leave-one-out", without, at, name))
    request, precision = parse_request(requested.speedups), requested.train.precision
    for decision in resolved.decisions if request.auto else ():  # otherwise what is on is stated
        name, added = decision.name, resolved.additions.get(decision.name, ())
        why_not = added if isinstance(added, str) else None
        if decision.on:
            continue
        is_set = precision != "auto" and "precision" in SPEEDUPS.get(name).sets
        if why_not is None and (is_set or name in request.dropped):
            why_not = f"not measured: {decision.reason}."
        if why_not is not None:
            points.append(Point(name, "absent", at, None, name, why_not))
            continue
        after = Setting(frozenset(added))
        more = [f"+ {one}" for one in in_order(after.on - at.on - {name})]
        gone = [f"- {one}" for one in full if one not in after.on]
        points.append(Point(", ".join([f"+ {name}", *more, *gone]), "add-one", after, at, name))
    return points


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in the order of `all_speedups`, each after the ones that it needs."""
    wanted = sorted(names)
    order = [speedup.name for speedup in all_speedups(wanted)]
    wanted.sort(key=order.index)
    placed: list[str] = []
    while wanted:
        ready = next(name for name in wanted if not {*wanted} & {*speedup_named(name).needs})
        placed.append(ready)
        wanted.remove(ready)
    return placed


def needing(names: Collection[str], among: Collection[str]) -> set[str]:
    """Return `names`, and those `among` that need one of them, directly or not."""
    found = set(names)
    while more := {n for n in among if n not in found and found & {*speedup_named(n).needs}}:
        found |= more
    return found


def tolerance_between(one: Setting, other: Setting) -> Tolerance:
    """Return the tolerance between the losses of two settings of a recipe: the loosest of the
    unshared speedups. Other rows count as the speedup that chooses them.

    Rounding tolerances add up, and include the largest one of the shared speedups: a difference in
    the last bit of fp32 flips some later roundings to bfloat16, and the losses differ by those.
    """
    unshared = one.on ^ other.on
    if {key for key, _ in one.values ^ other.values} & {ROWS}:
        unshared |= {*speedups_for("most_rows")}
    changed = [SPEEDUPS.get(name) for name in unshared]
    tolerances = [speedup.tolerance for speedup in changed]
    if any("activations" in speedup.sets for speedup in changed):  # other code is compiled
        shared = (SPEEDUPS.get(name) for name in one.on & other.on)
        tolerances += [speedup.tolerance for speedup in shared if speedup.compiles]
    loosest = max(tolerances, key=lambda p: STRICTNESS.index(p.kind), default=Tolerance.exact())
    kind = loosest.kind
    amplified = (SPEEDUPS.get(n).tolerance.rtol for n in one.on & other.on if kind == "rounding")
    return Tolerance(kind, sum(p.rtol for p in tolerances) + max(amplified, default=0.0))


def setting_of(resolved: Resolved) -> Setting:
    """Return the setting that `auto` chose, its micro-batch as a number."""
    config, chooser = resolved.config, {*speedups_for("most_rows")}
    start = Setting(frozenset(resolved.speedups) - chooser)
    tokens, rows = config.batch.tokens_per_step, config.batch.rows_per_device
    return start.but({TOKENS: tokens, ROWS: rows, "batch.accumulate": None})


def rows_to_try(start: int, sequences: int) -> list[int]:
    """Return the divisors of a step's sequences around `start`, each about twice the one before."""
    down, kept = [*divisors(sequences, sequences)], [start]
    for rows in reversed(down):
        kept += [rows] if rows >= 2 * kept[-1] else []
    for rows in down:
        kept[:0] = [rows] if 2 * rows <= kept[0] else []
    return kept


def memory_obstacle(resolved: Resolved) -> Callable[[Setting], str | None]:
    """Return a function from a setting to why it cannot fit into memory by estimate, or None."""
    config, machine = resolved.config, resolved.machine
    sequences = sequences_of(config)
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
            workload = workload_of(config, assemble(in_order(setting.on)))
        except ConfigError as error:
            return error.what
        need = estimate(workload, setting.rows, max(sequences // setting.rows, 1)).total / GIB
        if need <= available:
            return None
        return f"It needs about {need:.1f} GiB by estimate, and {owner}."

    return obstacle
