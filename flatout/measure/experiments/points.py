"""Chooses what `bench` measures: an ablation of the speedups, or a sweep over one setting.

The ablation starts at the plain `Recipe()`, with a typical hand-written micro-batch
(`recipe.rows_people_write`), and adds one speedup at a time up to the full set, which is the one
that `train` would use. `micro-batch` is one of them. Then each speedup is removed from the full set
(leave one out), and each one that `auto` leaves off but that can run here is added to it (add one).
A sweep measures the full set at several values of a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from flatout.assembly.recipe import divisors
from flatout.assembly.selection import (
    Decision,
    all_speedups,
    parse_request,
    providers,
    removing,
    select,
    speedup_named,
)
from flatout.config.registry import SPEEDUPS
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, FlatoutError
from flatout.measure.experiments.losses import Trials, tolerance_between
from flatout.measure.experiments.records import Row
from flatout.measure.experiments.resolving import Resolved
from flatout.measure.experiments.schedule import Experiment, Point, with_speedups
from flatout.models.language_model import model_of
from flatout.progress import counted

BASELINE, ABLATION = "baseline", "ablation"
Points = dict[str, dict[str, Any] | str]
"""Name -> the configuration keys of a point, or the reason why it cannot be measured."""

MAX_ACCUMULATE = 8


def ablation_experiment(requested: RunConfig, resolved: Resolved) -> Experiment:
    """Return the points of the ablation. Rows with equal sets of speedups share one.

    The full set comes right after the baseline, so that even the shortest bench finds the total.
    """
    planned = plan_ablation(requested, resolved.decisions, resolved.additions)
    rows = {row.name: row for row in planned if row.kind != "absent"}
    first: dict[frozenset[str], str] = {}
    points = {name: first.setdefault(frozenset(row.speedups), name) for name, row in rows.items()}
    full = points[full_set(planned).name]
    return Experiment(
        ABLATION,
        tuple(
            Point(name, with_speedups(rows[name].speedups), rows[name].kind == "add-one")
            for name in dict.fromkeys((BASELINE, full, *points.values()))
        ),
        lambda found: ablation_rows(planned, points, found),
        pairs=tuple(
            (
                points[name],
                points[other],
                tolerance_between(row.speedups, rows[other].speedups).kind,
            )
            for name, row in rows.items()
            if (other := row.against)
        ),
        total=None if full == BASELINE else (full, BASELINE),
    )


def plan_ablation(
    config: RunConfig, decisions: Sequence[Decision], additions: Mapping[str, Sequence[str] | str]
) -> list[Row]:
    """Return the rows of the ablation of the speedups that are on in `decisions`, without results.

    A speedup that is off is added to the full set if `speedups` leaves the choice to auto and does
    not drop it. Otherwise its row has the reason.
    """
    full = in_order(decision.name for decision in decisions if decision.on)
    rows = [Row(name=BASELINE, kind="baseline")]
    for count, name in enumerate(full, 1):
        below, on = rows[-1].name, full[:count]
        rows.append(Row(name=f"+ {name}", kind="added", speedup=name, speedups=on, against=below))
    top = rows[-1].name
    for name in full:
        gone = needing({name}, full)
        rest = [other for other in full if other not in gone]
        rows.append(
            Row(
                name=f"all but {name}",
                kind="leave-one-out",
                speedup=name,
                speedups=rest,
                against=top,
            )
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
            rows.append(added_to_full(name, in_order(added), full, top))
            continue
        absent.append(unmeasured(name, reason, speedup=name))
    return rows + absent


def unmeasured(name: str, reason: str, *, speedup: str | None = None) -> Row:
    """Return the row of what cannot be measured, or need not be."""
    return Row(name=name, kind="absent", speedup=speedup, status="not-measured", reason=reason)


def full_set(rows: Sequence[Row]) -> Row:
    """Return the row of the full set. Without speedups, it is the baseline."""
    return [row for row in rows if row.kind in ("baseline", "added")][-1]


def added_to_full(name: str, speedups: list[str], full: Sequence[str], top: str) -> Row:
    """Return the row of the full set with one speedup added.

    Its name lists what else was added with it, and what they replaced.
    """
    replaced = [other for other in full if other not in speedups]
    others = [other for other in speedups if other not in full and other != name]
    added = " and ".join([name, *others])
    title = f"all, with {added} for {' and '.join(replaced)}" if replaced else f"all and {added}"
    return Row(
        name=title, kind="add-one", speedup=name, speedups=speedups, against=top, replaced=replaced
    )


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


def ablation_rows(planned: Sequence[Row], points: Mapping[str, str], found: Trials) -> list[Row]:
    """Return the rows of an ablation with their results.

    `points` maps each row to the point whose trials it uses. A row that adds a speedup to the
    previous ones is compared with the nearest one above that was measured, every other row with
    the full set only.
    """
    measured = {row.name: row for row in planned if row.kind != "absent"}
    full, rows = full_set(planned).name, []
    for name, row in measured.items():
        update: dict[str, object] = {}
        below = row.against
        while below and not found.ok(points[below]):
            below = measured[below].against if row.kind == "added" else None
        left_out = row.kind == "leave-one-out"
        pair = points[name], points[below or name]
        gain = found.gain(*(pair[::-1] if left_out else pair)) if below else None
        if below and gain:
            verdict = gain.verdict(left_out=left_out)
            if below != row.against:
                verdict += f", together with the rows that failed, against {below}"
            tolerance = tolerance_between(row.speedups, measured[below].speedups)
            update = found.check(tolerance, *pair).model_dump()
            update |= {"against": below, "gain": gain, "verdict": verdict}
        elif row.against and not found.ok(points[row.against]):
            which = "the full set" if row.against == full else row.against
            update = {"verdict": f"{which} was not measured"}
        rows.append(found.measured(row, points[name]).model_copy(update=update))
    return rows + [row for row in planned if row.kind == "absent"]


def sweep_experiment(what: str, requested: RunConfig, resolved: Resolved) -> Experiment:
    """Return the points of `flatout bench --sweep WHAT`, with the applicable speedups.

    Raises: ConfigError when there is nothing to measure in it.
    """
    found = SWEEPS[what](requested, resolved)
    points = [Point(name, keys) for name, keys in found.items() if not isinstance(keys, str)]
    absent = [unmeasured(name, why) for name, why in found.items() if isinstance(why, str)]
    if not points:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in absent)
        raise ConfigError(
            f"--sweep {what} has nothing to measure: {reasons}.",
            fix="Sweep a different setting.",
        )

    def rows(trials: Trials) -> list[Row]:
        empty = [Row(name=point.name, kind="point") for point in points]
        return [trials.measured(row, row.name) for row in empty] + absent

    return Experiment(what, tuple(points), rows)


def batch(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the sequences per micro-batch, doubling from 1 to a whole step, which stays the same."""
    sequences = (resolved.config.batch.tokens_per_step or 0) // resolved.config.data.seq_len
    sizes = sorted(
        {rows for power in range(sequences.bit_length()) if sequences % (rows := 2**power) == 0}
        | {sequences}
    )
    return {counted(rows, "row"): rows_of(rows, resolved) for rows in sizes}


def accumulation(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the micro-batches per step from 1 to 8, each of the recipe's size. The step grows."""
    rows, seq_len = int(resolved.config.batch.rows_per_device), resolved.config.data.seq_len
    counts = [2**power for power in range(MAX_ACCUMULATE.bit_length())]
    return {
        counted(n, "micro-batch", "micro-batches"): rows_of(rows, resolved)
        | {"batch.tokens_per_step": n * rows * seq_len}
        for n in counts
    }


def seq_len(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the sequence length from a quarter to four times the recipe's.

    The tokens per step and per micro-batch stay the same.
    """
    config, tokens = resolved.config, resolved.config.batch.tokens_per_step or 0
    points: Points = {}
    for length in (config.data.seq_len * factor // 4 for factor in (1, 2, 4, 8, 16)):
        name = counted(length, "token")
        try:
            if length < 1 or tokens % length:
                points[name] = (
                    f"cannot run here, because a step of {tokens} tokens is not a multiple of it."
                )
            elif not resolved.dataset.split("train").num_sequences(length):
                points[name] = (
                    "cannot run here, because the training text is shorter than one sequence."
                )
            else:
                model_of(requested, vocab_size=config.model.vocab_size, seq_len=length)
                rows = int(config.batch.rows_per_device) * config.data.seq_len // length
                rows = next(divisors(tokens // length, rows), 1)
                points[name] = {"data.seq_len": length} | rows_of(rows, resolved)
        except FlatoutError as error:
            points[name] = f"cannot run here, because: {error.what}"
    return points


def precision(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the precision of matmuls: fp32, and each speedup that changes it."""
    choices, machine, device = precisions(), resolved.machine, resolved.config.train.device
    requested = requested.with_values({"train.device": device, "train.precision": "auto"})
    speedups = requested.speedups
    for name in choices:
        speedups = removing(name, speedups)
    stated = requested.with_values({"train.precision": "fp32", "speedups": speedups})
    plain = [decision.name for decision in select(stated, machine, device=device) if decision.on]
    points: Points = {"fp32": with_speedups(plain)}
    for speedup in map(SPEEDUPS.get, choices):
        others = [one for one in plain if not speedup.fills.keys() & SPEEDUPS.get(one).fills.keys()]
        why_not = speedup.reason_against(machine, requested)
        points[speedup.name] = (
            f"cannot run here, because: {why_not}"
            if why_not
            else with_speedups([*others, speedup.name])
        )
    return points


def prefetch(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the steps that the data loader reads ahead: none, 1, 2, 4 or 8."""
    loaders = filling("loader")
    others = [name for name in resolved.speedups if name not in loaders]
    ahead: Points = {
        f"{counted(steps, 'step')} ahead": {"data.prefetch": steps}
        | with_speedups([*others, loaders[0]])
        for steps in (1, 2, 4, 8)
        if loaders
    }
    return {"no prefetch": with_speedups(others), **ahead}


def filling(slot: str) -> list[str]:
    """Return the speedups that fill a slot, in the order of `all_speedups`."""
    return [speedup.name for speedup in all_speedups() if slot in speedup.fills]


def precisions() -> list[str]:
    """Return the speedups that change the precision of matmuls, grouped by precision."""
    provides = providers()
    return filling("matmul") + [
        name
        for precision in dict.fromkeys(provides.values())
        for name in filling("precision")
        if provides[name] == precision
    ]


SWEEPS: Mapping[str, Callable[[RunConfig, Resolved], Points]] = {
    "batch": batch,
    "seq_len": seq_len,
    "precision": precision,
    "accumulation": accumulation,
    "prefetch": prefetch,
}
"""The sweeps by name. Each returns its points."""


def rows_of(rows: int, resolved: Resolved) -> dict[str, Any]:
    """Return the keys for a micro-batch of `rows`, without the speedup that would choose it."""
    stated = {
        "batch.tokens_per_step": resolved.config.batch.tokens_per_step,
        "batch.rows_per_device": rows,
        "batch.accumulate": None,
    }
    choosers = filling("micro_batch")
    return stated | with_speedups(name for name in resolved.speedups if name not in choosers)
