"""The records of a run as curves, and what a chart can show of a long one."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType

import numpy as np
from numpy.typing import NDArray

from flatout.measure.diagnose.diagnosis import FILE, read_diagnosis
from flatout.measure.results import SUMMARY_FILE
from flatout.measure.runlog import RunLog
from flatout.progress import counted
from flatout.storage.json_io import is_finite

Array = NDArray[np.float64]
POSITIONS = ("step", "tokens", "elapsed_s")
"""What a curve can be drawn against."""
NUMBERS = {int, float, NoneType}
"""Types of a metric. Null is a value that was not finite."""
MAX_EVENTS = 20_000
"""Events beyond this number are omitted."""
INTERVALS = 600
"""Intervals of a long curve. Each contributes its lowest and its highest point."""
TREND_INTERVALS = 150
"""Intervals whose means are the trend."""
MIN_FOR_TREND = 4 * TREND_INTERVALS
"""Shorter curves have no trend: they can be read as they are."""


@dataclass(frozen=True)
class Curve:
    """One metric of a run at each record that has it. All arrays have the same length."""

    step: Array
    tokens: Array
    """NaN where a record does not have it."""
    elapsed_s: Array
    """NaN where a record does not have it."""
    value: Array

    def at(self, rows: NDArray[np.int64]) -> Curve:
        """Return the curve at some of its records."""
        return Curve(*(getattr(self, f.name)[rows] for f in fields(Curve)))


class RunData(RunLog):
    """What the directory of one run contains at one moment, with its metrics as curves.

    Numbers are read into columns, which take a tenth of the memory of the records.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Read the directory. `name` is what the page calls the run."""
        super().__init__(path)
        self.name = name
        self.curves: dict[str, Curve] = {}
        """By the name in metrics.jsonl, such as train/loss."""
        positions: list[array[float]] = [array("d") for _ in POSITIONS]
        figures: dict[str, tuple[array[int], array[float]]] = defaultdict(
            lambda: (array("q"), array("d"))
        )
        for row, line in enumerate(self.lines()):
            place = (line["step"], line.get("tokens"), line.get("elapsed_s", line.get("wall_s")))
            for column, value in zip(positions, place, strict=True):
                column.append(_number(value))
            for figure, value in line.items():
                if "/" in figure and type(value) in NUMBERS:
                    rows, values = figures[figure]
                    rows.append(row)
                    values.append(_number(value))
        self.num_records, count = len(positions[0]), len(self.events)
        for figure, (rows, values) in figures.items():
            value = np.array(values)
            step, tokens, elapsed_s = (np.array(each)[np.array(rows)] for each in positions)
            self.curves[figure] = Curve(step, tokens, elapsed_s, value)
            if gaps := int(np.count_nonzero(np.isnan(value))):
                records = counted(gaps, "record")
                self.notes.append(
                    f"{figure} is not a finite number in {records}: gaps in its curve."
                )
        if not self.num_records:
            self.notes.append("metrics.jsonl has no records yet, so there are no curves.")
        if count > MAX_EVENTS:
            self.events = self.events[:MAX_EVENTS]
            self.notes.append(
                f"events.jsonl has more than {MAX_EVENTS:,} events. "
                "The report shows the first ones."
            )
        _ = self.settings, self.summary  # now, as their damage becomes a note
        self.diagnosis = read_diagnosis(path)
        """What `flatout diagnose` found."""
        if self.diagnosis is None and (path / FILE).exists():
            self.notes.append(f"{FILE} is damaged, or was not written by this version of flatout.")

    @property
    def changes(self) -> str:
        """What `flatout tune` changed in a script, and the patch."""
        path = self.path / SUMMARY_FILE
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    @property
    def longest(self) -> Curve | None:
        """The curve with the most records, which define where a step is drawn."""
        return max(self.curves.values(), key=lambda curve: len(curve.step), default=None)

    def values(self, figure: str) -> Array:
        """Return the finite values of a metric."""
        curve = self.curves.get(figure)
        return np.array([]) if curve is None else curve.value[np.isfinite(curve.value)]


def read_runs(paths: list[Path]) -> list[RunData]:
    """Return the contents of run directories, each with a unique short name."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return [RunData(path, name) for path, name in zip(paths, names, strict=True)]


def _number(value: object) -> float:
    """Return a number as a float. NaN for anything else."""
    return float(value) if is_finite(value) else math.nan


def outline(curve: Curve) -> Curve:
    """Return the points to draw: all of them, or the lowest and highest of each interval.

    No peak is lost. An interval without a finite value contributes one point, a gap in the line.
    """
    count = len(curve.value)
    if count <= 2 * INTERVALS:
        return curve
    kept = [0, count - 1]
    edges = np.linspace(0, count, INTERVALS + 1).astype(np.int64)
    for start, end in pairwise(edges):
        values = curve.value[start:end]
        if np.isfinite(values).any():
            kept += [start + int(np.nanargmin(values)), start + int(np.nanargmax(values))]
        else:
            kept.append(start)
    return curve.at(np.unique(kept))


def trend(curve: Curve) -> Curve | None:
    """Return the means of TREND_INTERVALS intervals, at their middles. None for a short curve."""
    count = len(curve.value)
    if count < MIN_FOR_TREND:
        return None
    edges = np.linspace(0, count, TREND_INTERVALS + 1).astype(np.int64)
    finite = np.isfinite(curve.value)
    sums = np.add.reduceat(np.where(finite, curve.value, 0.0), edges[:-1])
    numbers = np.add.reduceat(finite.astype(np.float64), edges[:-1])
    means = np.divide(sums, numbers, out=np.full(TREND_INTERVALS, np.nan), where=numbers > 0)
    middle = curve.at((edges[:-1] + edges[1:]) // 2)
    return Curve(middle.step, middle.tokens, middle.elapsed_s, means)
