"""Chooses the sets of speedups to measure, and the set that each is compared with.

The ladder starts at the plain `Recipe()`, with a typical hand-written micro-batch
(`recipe.rows_people_write`), and adds one speedup at a time up to the full set, which is the one
that `train` would use; `micro-batch` is one of them. The ablations follow: each speedup is left out
of the full set, and each one that `auto` leaves off but that can run here is added to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.assembly.recipe import Promise, Speedup
from flatout.assembly.selection import Decision, all_speedups, parse_request
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
    """The speedup that this rung measures."""
    against: str | None
    """The rung that it is compared with: the one below, or the full set."""
    replaced: tuple[str, ...] = ()
    """Speedups of the full set that it replaces."""


@dataclass(frozen=True)
class Absent:
    """A speedup without a rung."""

    speedup: str
    reason: str
    """Why, as a sentence."""


@dataclass(frozen=True)
class Ladder:
    """The rungs to measure, and the speedups without a rung, with the reasons."""

    rungs: tuple[Rung, ...]
    absent: tuple[Absent, ...]
    full: str
    """The rung of the full set."""

    def rung(self, name: str) -> Rung:
        """Return a rung by its name."""
        return next(rung for rung in self.rungs if rung.name == name)


def make_ladder(
    config: RunConfig, decisions: Sequence[Decision], additions: Mapping[str, Sequence[str] | str]
) -> Ladder:
    """Return the ladder for the speedups that are on in `decisions`.

    A speedup that is off is added to the full set if `speedups` leaves the choice to auto and does
    not drop it. `additions` maps it to the resulting set, or to the reason why that is impossible.
    """
    known = {speedup.name: speedup for speedup in all_speedups([d.name for d in decisions])}
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
        found = additions.get(decision.name, ())
        if isinstance(found, str):
            absent.append(Absent(decision.name, found))
        elif why_not := reason_to_leave(decision, config):
            absent.append(Absent(decision.name, why_not))
        else:
            rungs.append(added_to_full(decision.name, tuple(in_order(found, known)), full, top))
    return Ladder(tuple(rungs), tuple(absent), top)


def added_to_full(name: str, speedups: tuple[str, ...], full: Sequence[str], top: str) -> Rung:
    """Return the rung of the full set with one speedup added.

    Its name lists what else was added with it, and what they replaced.
    """
    replaced = tuple(other for other in full if other not in speedups)
    added = " and ".join(
        [name, *(other for other in speedups if other not in full and other != name)]
    )
    title = f"all, with {added} for {' and '.join(replaced)}" if replaced else f"all and {added}"
    return Rung(title, "put-in", speedups, name, top, replaced)


def in_order(names: Iterable[str], known: dict[str, Speedup]) -> list[str]:
    """Return names in the order of the ladder, each after the ones that it needs."""
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
    """Return the full set without a speedup and the ones that need it."""
    gone = {name}
    while more := {other for other in full if other not in gone and gone & set(known[other].needs)}:
        gone |= more
    return tuple(other for other in full if other not in gone)


def reason_to_leave(decision: Decision, config: RunConfig) -> str | None:
    """Return why a speedup that could run is not measured, None when it is."""
    request = parse_request(config.speedups)
    if decision.name in request.dropped or not request.auto:
        return f"not measured: {decision.reason}."
    if config.train.precision != "auto" and "precision" in SPEEDUPS.get(decision.name).fills:
        return f"not measured: train.precision={config.train.precision} is set."
    return None


def promise_between(one: Iterable[str], other: Iterable[str]) -> Promise:
    """Return the promise about the losses of two sets: the loosest of the unshared speedups.

    Rounding tolerances add up, and include the largest one of the shared speedups: a difference in
    the last bit of fp32 flips some later roundings to bfloat16, and the losses differ by those.
    """
    shared, unshared = set(one) & set(other), set(one) ^ set(other)
    promises = [SPEEDUPS.get(name).promise for name in unshared]
    loosest = max(
        promises, key=lambda promise: STRICTNESS.index(promise.kind), default=Promise.exact()
    )
    amplified = (
        [SPEEDUPS.get(name).promise.rtol for name in shared] if loosest.kind == "rounding" else []
    )
    return Promise(
        loosest.kind, sum(promise.rtol for promise in promises) + max(amplified, default=0.0)
    )
