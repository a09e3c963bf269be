"""An experiment: points, each a configuration to measure, and the rows made from their trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flatout.measure.promises import Measured
from flatout.measure.results import Row


@dataclass(frozen=True)
class Point:
    """One configuration to measure."""

    name: str
    values: Mapping[str, Any]
    """Keys that override the requested configuration."""


@dataclass(frozen=True)
class Experiment:
    """All points, the most important first: when time is short, the last ones are dropped."""

    kind: str
    """ladder, or the setting that is swept."""
    points: tuple[Point, ...]
    """Measured in every round."""
    rows: Callable[[Measured], list[Row]]
    """Makes the table from the trials."""
    loss_steps: int = 0
    """Number of first losses to compare."""
    losses_each_round: frozenset[str] = frozenset()
    """Points that record losses in every round, because a statistical promise needs seeds."""
    exact: tuple[tuple[str, str], ...] = ()
    """Pairs of points that promise equal losses, if runs differ in their last bits here."""
    extras: tuple[Point, ...] = ()
    """Measured last in a round; with a time limit, only after the others have repeats."""
    total: tuple[str, str] | None = None
    """The full set and the baseline, whose ratio is the total speedup."""


def with_speedups(names: Iterable[str]) -> dict[str, Any]:
    """Return the configuration keys that switch on exactly these speedups, precisions included."""
    return {"speedups": list(names) or "none", "train.precision": "auto"}
