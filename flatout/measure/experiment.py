"""What is measured: points, each a configuration of its own, and how rows come of their trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flatout.measure.judge import Measured
from flatout.measure.results import Row


@dataclass(frozen=True)
class Point:
    """One configuration that is measured."""

    name: str
    values: Mapping[str, Any]
    """Keys laid over the configuration that was asked for."""


@dataclass(frozen=True)
class Experiment:
    """All points, the most important first: the last ones give way when the time is short."""

    kind: str
    """ladder, or what is swept."""
    points: tuple[Point, ...]
    """Measured in every round."""
    rows: Callable[[Measured], list[Row]]
    """The table, from the trials."""
    loss_steps: int = 0
    """First losses that are compared."""
    losses_each_round: frozenset[str] = frozenset()
    """Points that take them in every round: a statistical promise is judged over seeds."""
    exact: tuple[tuple[str, str], ...] = ()
    """Pairs of points whose losses are promised to be equal, on a device whose runs do not repeat
    to the bit.
    """
    extras: tuple[Point, ...] = ()
    """Measured last in a round, and with little time only once the others have their repeats: one
    of them may be slow.
    """
    total: tuple[str, str] | None = None
    """The fastest and the slowest point, whose ratio is the total speedup."""


def with_speedups(names: Iterable[str]) -> dict[str, Any]:
    """Return the configuration keys that switch on these speedups and no others; a precision is one
    of them.
    """
    return {"speedups": list(names) or "none", "train.precision": "auto"}
