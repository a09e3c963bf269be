"""Which sets of speedups are measured, and what each is compared with.

The ladder begins at `baseline()`, with the micro-batch that people write
(`recipe.rows_people_write`), and adds one speedup at a time until it is the full set, the one that
`train` would use; `micro-batch` is one of them. Then each is left out of the full set, and each
that is off under `auto` but could run here is put in: that rung is what naming it besides makes of
the full set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.assembly.auto import all_speedups
from flatout.assembly.parts import Decision
from flatout.assembly.recipe import Promise, Speedup
from flatout.assembly.request import parse_request
from flatout.assembly.selection import speedup_named
from flatout.config.schema import RunConfig
from flatout.registry import SPEEDUPS

Kind = Literal["baseline", "added", "left-out", "put-in"]

BASELINE = "baseline"
STRICTNESS = ("exact", "rounding", "statistical")


@dataclass(frozen=True)
class Rung:
    """One set of speedups."""

    name: str
    kind: Kind
    speedups: tuple[str, ...]
    speedup: str | None
    """The one that this rung is about."""
    against: str | None
    """The rung it is compared with: the one below, or the full set."""
    replaced: tuple[str, ...] = ()
    """Speedups of the full set that gave way to it."""


@dataclass(frozen=True)
class Absent:
    """A speedup that has no rung."""

    speedup: str
    reason: str
    """Why: a sentence."""


@dataclass(frozen=True)
class Ladder:
    """Everything that is measured, and everything that is not, with the reason."""

    rungs: tuple[Rung, ...]
    absent: tuple[Absent, ...]
    full: str
    """The rung that holds the full set."""

    def rung(self, name: str) -> Rung:
        """Return the rung of that name."""
        return next(rung for rung in self.rungs if rung.name == name)


def make_ladder(
    config: RunConfig, decisions: Sequence[Decision], put_in: Mapping[str, Sequence[str] | str]
) -> Ladder:
    """Return the ladder for the speedups that `decisions` has on.

    A speedup that is off is put in when `speedups` leaves the choice to auto, does not drop it, and
    nothing stands against it; a list of speedups is measured as it stands. `put_in` says what is on
    then, or why that cannot be.
    """
    known = {
        speedup.name: speedup
        for speedup in [
            *all_speedups(),
            *(speedup_named(d.name) for d in decisions if ":" in d.name),
        ]
    }
    full = in_order((d.name for d in decisions if d.on), known)
    rungs = [Rung(BASELINE, "baseline", (), None, None)]
    for count, name in enumerate(full, 1):
        rungs.append(Rung(f"+ {name}", "added", tuple(full[:count]), name, rungs[-1].name))
    top = rungs[-1].name
    rungs += [
        Rung(f"all but {name}", "left-out", without(full, name, known), name, top) for name in full
    ]
    absent: list[Absent] = []
    for decision in decisions:
        if decision.on:
            continue
        found = put_in.get(decision.name, ())
        if isinstance(found, str):
            absent.append(Absent(decision.name, found))
        elif why_not := reason_to_leave(decision, config):
            absent.append(Absent(decision.name, why_not))
        else:
            rungs.append(put_in_rung(decision.name, tuple(in_order(found, known)), full, top))
    return Ladder(tuple(rungs), tuple(absent), top)


def put_in_rung(name: str, speedups: tuple[str, ...], full: Sequence[str], top: str) -> Rung:
    """Return the rung of `speedups`, the full set with one put in; its name says what came with it
    and what that replaced.
    """
    replaced = tuple(other for other in full if other not in speedups)
    came = " and ".join(
        [name, *(other for other in speedups if other not in full and other != name)]
    )
    told = f"all, with {came} for {' and '.join(replaced)}" if replaced else f"all and {came}"
    return Rung(told, "put-in", speedups, name, top, replaced)


def in_order(names: Iterable[str], known: dict[str, Speedup]) -> list[str]:
    """Return names in the order of the ladder, none before what it needs."""
    wanted, order = set(names), list(known)
    placed: list[str] = []
    while wanted:
        ready = [
            name for name in sorted(wanted, key=order.index) if not wanted & set(known[name].needs)
        ]
        placed.append(ready[0])
        wanted.remove(ready[0])
    return placed


def without(full: Sequence[str], name: str, known: dict[str, Speedup]) -> tuple[str, ...]:
    """Return the full set without a speedup and without all that need it."""
    gone = {name}
    while more := {other for other in full if other not in gone and gone & set(known[other].needs)}:
        gone |= more
    return tuple(other for other in full if other not in gone)


def reason_to_leave(decision: Decision, config: RunConfig) -> str | None:
    """Return why a speedup that could run is not tried, None when it is."""
    wish = parse_request(config.speedups)
    if decision.name in wish.dropped or not wish.auto:
        return f"not measured: {decision.reason}."
    if config.train.precision != "auto" and "precision" in SPEEDUPS.get(decision.name).fills:
        return f"not measured: train.precision={config.train.precision} is set."
    return None


def promise_between(one: Iterable[str], other: Iterable[str]) -> Promise:
    """Return what may differ between the losses of two sets: the loosest kind of what they do not
    share, and all its rounding.

    Where that rounds, so does what they share: a difference in the last bit of fp32 turns some of
    the roundings to bfloat16 that follow, and they are what the losses then differ by.
    """
    alike, unlike = set(one) & set(other), set(one) ^ set(other)
    promises = [SPEEDUPS.get(name).promise for name in unlike]
    loosest = max(
        promises, key=lambda promise: STRICTNESS.index(promise.kind), default=Promise.exact()
    )
    passed_through = (
        [SPEEDUPS.get(name).promise.rtol for name in alike] if loosest.kind == "rounding" else []
    )
    return Promise(
        loosest.kind, sum(promise.rtol for promise in promises) + max(passed_through, default=0.0)
    )
