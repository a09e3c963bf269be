"""The records of a run as curves, and the points of a long one that a chart draws."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flatout.measure.diagnose.diagnosis import FILE, read_diagnosis
from flatout.measure.results import SUMMARY_FILE
from flatout.measure.runlog import RunLog
from flatout.progress import counted
from flatout.storage.json_io import is_finite

Curve: TypeAlias = NDArray[np.float64]
"""A metric at each record that has it: a row for each of COLUMNS. NaN where it is not known."""
COLUMNS = ("step", "tokens", "elapsed_s", "value")
"""Where a point can be drawn, and its value."""
NUMBERS = {int, float, NoneType}
"""Types of a metric. Null is a value that was not finite."""
MAX_EVENTS = 20_000
"""Events beyond this number are omitted."""
INTERVALS = 600
"""Intervals of a long curve. Each contributes its lowest and its highest point."""


class RunData(RunLog):
    """What the directory of one run contains at one moment, with its metrics as curves.

    Numbers are read into columns, which take a tenth of the memory of the records.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Read the directory. `name` is what the page calls the run."""
        super().__init__(path)
        self.name = name
        columns: dict[str, list[array[float]]]
        columns = defaultdict(lambda: [array("d") for _ in COLUMNS])
        self.num_records = 0
        for line in self.lines():
            self.num_records += 1
            place = (line["step"], line.get("tokens"), line.get("elapsed_s", line.get("wall_s")))
            for metric, value in line.items():
                if "/" in metric and type(value) in NUMBERS:
                    for column, number in zip(columns[metric], (*place, value), strict=True):
                        column.append(float(number) if is_finite(number) else math.nan)
        self.curves: dict[str, Curve] = {name: np.array(each) for name, each in columns.items()}
        """By the name in metrics.jsonl, such as train/loss."""
        for metric, curve in self.curves.items():
            if gaps := int(np.count_nonzero(np.isnan(curve[-1]))):
                records = counted(gaps, "record")
                self.notes.append(
                    f"{metric} is not a finite number in {records}: gaps in its curve."
                )
        if not self.num_records:
            self.notes.append("metrics.jsonl has no records yet, so there are no curves.")
        if len(self.events) > MAX_EVENTS:
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

    def values(self, name: str) -> list[float]:
        """Return the finite values of a metric, or of a position of the longest curve."""
        if name in COLUMNS:
            longest = max(self.curves.values(), key=np.size, default=None)
            row = None if longest is None else longest[COLUMNS.index(name)]
        else:
            row = self.curves[name][-1] if name in self.curves else None
        return [] if row is None else [float(value) for value in row[np.isfinite(row)]]


def read_runs(paths: list[Path]) -> list[RunData]:
    """Return the contents of run directories, each with a unique short name."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return [RunData(path, name) for path, name in zip(paths, names, strict=True)]


def outline(curve: Curve) -> Curve:
    """Return the points to draw: all of them, or the lowest and highest of each interval.

    No peak is lost. An interval without a finite value contributes one point, a gap in the line.
    """
    count = curve.shape[1]
    if count <= 2 * INTERVALS:
        return curve
    kept = [0, count - 1]
    edges = np.linspace(0, count, INTERVALS + 1).astype(np.int64)
    for start, end in pairwise(edges):
        values = curve[-1, start:end]
        if np.isfinite(values).any():
            kept += [start + int(np.nanargmin(values)), start + int(np.nanargmax(values))]
        else:
            kept.append(start)
    return curve[:, np.unique(kept)]
