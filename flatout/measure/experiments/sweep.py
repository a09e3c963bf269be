"""Sweeps: the full set of speedups at several values of one setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flatout.assembly.selection import all_speedups, parse_request, providers, select
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, FlatoutError
from flatout.measure.experiments.ladder import unmeasured
from flatout.measure.experiments.losses import Trials
from flatout.measure.experiments.records import Row
from flatout.measure.experiments.resolving import Resolved
from flatout.measure.experiments.schedule import Experiment, Point, with_speedups
from flatout.models.language_model import model_of
from flatout.progress import counted
from flatout.registry import SPEEDUPS

Points = dict[str, dict[str, Any] | str]
"""Name -> the configuration keys of a point, or the reason why it cannot be measured."""

MAX_ACCUMULATE = 8


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
            fix="Sweep another setting.",
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
    """Vary the micro-batches per step from 1 to 8, each of the recipe's size; the step grows."""
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
                rows = largest_divisor(tokens // length, rows)
                points[name] = {"data.seq_len": length} | rows_of(rows, resolved)
        except FlatoutError as error:
            points[name] = f"cannot run here, because: {error.what}"
    return points


def precision(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the precision of matrix products: fp32, and each speedup that changes it."""
    choices = precisions()
    plain = [name for name in resolved.speedups if name not in choices]
    requested = requested.with_values({"train.device": resolved.config.train.device})
    request = parse_request(requested.speedups)
    if request.auto:
        edits = [
            *(f"-{name}" for name in request.dropped),
            *(f"+{name}" for name in request.named if name not in choices),
        ]
        stated = requested.with_values(
            {"train.precision": "fp32", "speedups": ",".join(["auto", *edits])}
        )
        plain = [
            decision.name
            for decision in select(stated, resolved.machine, device=resolved.config.train.device)
            if decision.on
        ]
    points: Points = {"fp32": with_speedups(plain)}
    for name in choices:
        speedup = SPEEDUPS.get(name)
        why_not = speedup.reason_against(
            resolved.machine, requested.with_values({"train.precision": "auto"})
        )
        if why_not:
            points[name] = f"cannot run here, because: {why_not}"
        else:
            others = (
                other
                for other in plain
                if not speedup.fills.keys() & SPEEDUPS.get(other).fills.keys()
            )
            points[name] = with_speedups([*others, name])
    return points


def prefetch(requested: RunConfig, resolved: Resolved) -> Points:
    """Vary the steps that the feed reads ahead: none, 1, 2, 4 or 8."""
    feeds = filling("feed")
    others = [name for name in resolved.speedups if name not in feeds]
    ahead: Points = {
        f"{counted(steps, 'step')} ahead": {"data.prefetch": steps}
        | with_speedups([*others, feeds[0]])
        for steps in (1, 2, 4, 8)
        if feeds
    }
    return {"no prefetch": with_speedups(others), **ahead}


def filling(slot: str) -> list[str]:
    """Return the speedups that fill a slot, in the order of the ladder."""
    return [speedup.name for speedup in all_speedups() if slot in speedup.fills]


def precisions() -> list[str]:
    """Return the speedups that change the precision of products, grouped by precision."""
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
"""The sweeps by name; each returns its points."""


def rows_of(rows: int, resolved: Resolved) -> dict[str, Any]:
    """Return the keys for a micro-batch of `rows`, without the speedup that would choose it."""
    stated = {
        "batch.tokens_per_step": resolved.config.batch.tokens_per_step,
        "batch.rows_per_device": rows,
        "batch.accumulate": None,
    }
    choosers = filling("micro_batch")
    return stated | with_speedups(name for name in resolved.speedups if name not in choosers)


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` up to `at_most`, at least 1."""
    return next(
        (divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0), 1
    )
