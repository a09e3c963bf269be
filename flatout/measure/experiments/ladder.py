"""Chooses the sets of speedups to measure, and the set that each is compared with.

The ladder starts at the plain `Recipe()`, with a typical hand-written micro-batch
(`recipe.rows_people_write`), and adds one speedup at a time up to the full set, which is the one
that `train` would use; `micro-batch` is one of them. The ablations follow: each speedup is left out
of the full set, and each one that `auto` leaves off but that can run here is added to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from flatout.assembly.selection import Decision, all_speedups, parse_request, speedup_named
from flatout.config.schema import RunConfig
from flatout.measure.experiments.losses import Trials, promise_between
from flatout.measure.experiments.records import Row
from flatout.measure.experiments.resolving import Resolved
from flatout.measure.experiments.schedule import Experiment, Point, with_speedups
from flatout.registry import SPEEDUPS

BASELINE, LADDER = "baseline", "ladder"
Additions = Mapping[str, Sequence[str] | str]
"""For each speedup that is off: the set with it added, or why it cannot be added."""


def ladder_experiment(requested: RunConfig, resolved: Resolved, additions: Additions) -> Experiment:
    """Return the points of the ladder; rungs with equal sets of speedups share one.

    The full set comes right after the baseline, so that even the shortest bench finds the total.
    """
    ladder = make_ladder(requested, resolved.decisions, additions)
    rungs = {rung.name: rung for rung in ladder if rung.kind != "absent"}
    first: dict[frozenset[str], str] = {}
    points = {
        name: first.setdefault(frozenset(rung.speedups), name) for name, rung in rungs.items()
    }
    full = points[full_set(ladder).name]
    return Experiment(
        LADDER,
        tuple(
            Point(name, with_speedups(rungs[name].speedups), rungs[name].kind == "put-in")
            for name in dict.fromkeys((BASELINE, full, *points.values()))
        ),
        lambda found: ladder_rows(ladder, points, found),
        pairs=tuple(
            (
                points[name],
                points[other],
                promise_between(rung.speedups, rungs[other].speedups).kind,
            )
            for name, rung in rungs.items()
            if (other := rung.against)
        ),
        total=None if full == BASELINE else (full, BASELINE),
    )


def make_ladder(
    config: RunConfig, decisions: Sequence[Decision], additions: Additions
) -> list[Row]:
    """Return the ladder for the speedups that are on in `decisions`, as rows without figures.

    A speedup that is off is added to the full set if `speedups` leaves the choice to auto and does
    not drop it; otherwise its row has the reason.
    """
    full = in_order(decision.name for decision in decisions if decision.on)
    rungs = [Row(name=BASELINE, kind="baseline")]
    for count, name in enumerate(full, 1):
        below, on = rungs[-1].name, full[:count]
        rungs.append(Row(name=f"+ {name}", kind="added", speedup=name, speedups=on, against=below))
    top = rungs[-1].name
    for name in full:
        gone = needing({name}, full)
        rest = [other for other in full if other not in gone]
        rungs.append(
            Row(name=f"all but {name}", kind="left-out", speedup=name, speedups=rest, against=top)
        )
    absent, request = [], parse_request(config.speedups)
    precision = config.train.precision
    for decision in decisions:
        name, added = decision.name, additions.get(decision.name, ())
        if decision.on:
            continue
        if isinstance(added, str):
            reason = added
        elif name in request.dropped or not request.auto:
            reason = f"not measured: {decision.reason}."
        elif precision != "auto" and "precision" in SPEEDUPS.get(name).fills:
            reason = f"not measured: train.precision={precision} is set."
        else:
            rungs.append(added_to_full(name, in_order(added), full, top))
            continue
        absent.append(unmeasured(name, reason, speedup=name))
    return rungs + absent


def unmeasured(name: str, reason: str, *, speedup: str | None = None) -> Row:
    """Return the row of what cannot be measured, or need not be."""
    return Row(name=name, kind="absent", speedup=speedup, status="not-measured", reason=reason)


def full_set(ladder: Sequence[Row]) -> Row:
    """Return the rung of the full set; without speedups, it is the baseline."""
    return [rung for rung in ladder if rung.kind in ("baseline", "added")][-1]


def added_to_full(name: str, speedups: list[str], full: Sequence[str], top: str) -> Row:
    """Return the rung of the full set with one speedup added.

    Its name lists what else was added with it, and what they replaced.
    """
    replaced = [other for other in full if other not in speedups]
    others = [other for other in speedups if other not in full and other != name]
    added = " and ".join([name, *others])
    title = f"all, with {added} for {' and '.join(replaced)}" if replaced else f"all and {added}"
    return Row(
        name=title, kind="put-in", speedup=name, speedups=speedups, against=top, replaced=replaced
    )


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in the order of the ladder, each after the ones that it needs."""
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


def ladder_rows(ladder: Sequence[Row], points: Mapping[str, str], found: Trials) -> list[Row]:
    """Return the rows of a ladder with their figures.

    `points` maps each rung to the point whose trials it uses. A rung that adds a speedup is
    compared with the nearest one below that gave figures, an ablation with the full set only.
    """
    rungs = {rung.name: rung for rung in ladder if rung.kind != "absent"}
    full, rows = full_set(ladder).name, []
    for name, rung in rungs.items():
        update: dict[str, object] = {}
        below = rung.against
        while below and not found.ok(points[below]):
            below = rungs[below].against if rung.kind == "added" else None
        left_out = rung.kind == "left-out"
        pair = points[name], points[below or name]
        gain = found.gain(*(pair[::-1] if left_out else pair)) if below else None
        if below and gain:
            verdict = gain.verdict(left_out=left_out)
            if below != rung.against:
                verdict += f", together with the rungs without figures, against {below}"
            promise = promise_between(rung.speedups, rungs[below].speedups)
            update = found.check(promise, *pair).model_dump()
            update |= {"against": below, "gain": gain, "verdict": verdict}
        elif rung.against and not found.ok(points[rung.against]):
            which = "the full set" if rung.against == full else rung.against
            update = {"verdict": f"{which} gave no figures"}
        rows.append(found.measured(rung, points[name]).model_copy(update=update))
    return rows + [rung for rung in ladder if rung.kind == "absent"]
