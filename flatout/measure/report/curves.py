"""The records of a run as curves, and the points of a long one that a chart draws."""

from __future__ import annotations

import math
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flatout.errors import FlatoutError
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.diagnose.recorded import recorded_evidence
from flatout.measure.evidence import typical
from flatout.progress import counted
from flatout.storage.json_io import is_finite
from flatout.training.run_dir.runlog import RunLog

Curve: TypeAlias = NDArray[np.float64]
"""A metric at each record that has it: a row for each of COLUMNS. NaN where it is not known."""
COLUMNS = ("step", "tokens", "elapsed_s", "value")
"""Where a point can be drawn, and its value."""
NUMBERS = {int, float, NoneType}
"""Types of a metric. Null is a value that was not finite."""
INTERVALS = 600
"""Intervals of a long curve. Each contributes its lowest and its highest point."""


@dataclass(frozen=True)
class Chart:
    """Metrics of metrics.jsonl that share a unit."""

    title: str
    unit: str
    labels: Mapping[str, str]
    """Name in metrics.jsonl to label. "": that of the chart."""
    scale: float = 1.0
    """Values are multiplied by this."""
    reduce: Callable[[Sequence[float]], float | None] = typical
    """What a run reached."""


LAST = itemgetter(-1)
STEP = {f"perf/{name}_ms": name for name in ("step", "device", "host")}
STEP["perf/data_wait_ms"] = "waiting for data"
MEMORY = {f"mem/{name}_gib": name for name in ("peak", "allocated", "reserved", "process")}
LOSSES = {"train/loss": "training", "val/loss": "validation"}
CHARTS = (
    Chart("Loss", "nats per token", LOSSES, reduce=LAST),
    Chart("Throughput", "tokens/s", {"perf/tokens_per_s": ""}),
    Chart("Model FLOPs utilisation", "% of the peak", {"perf/mfu": ""}, scale=100),
    Chart("Time of a step", "ms", STEP),
    Chart("Memory", "GiB", MEMORY, reduce=max),
    Chart("Gradient norm", "before clipping", {"train/grad_norm": ""}),
    Chart("Learning rate", "", {"train/lr": ""}, reduce=LAST),
    Chart("Other processes", "cores busy", {"cpu/other_cores": ""}),
    Chart("GPU utilisation", "%", {"gpu/util_pct": ""}),
    Chart("GPU power", "W", {"gpu/power_w": ""}),
)
NOT_DRAWN = {"cpu/cores", "train/epoch", "perf/samples_per_s", "perf/steps_per_s"}
"""Metrics that repeat the shape of another chart."""


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
        self.num_records, self.steps, self.elapsed_s = 0, 0, None
        for line in self.lines():
            self.num_records += 1
            place = (line["step"], line.get("tokens"), line.get("elapsed_s", line.get("wall_s")))
            self.steps, self.elapsed_s = max(self.steps, place[0]), place[2]
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
        _ = self.settings, self.summary  # now, as their damage becomes a note
        self.diagnosis: Diagnosis | None = None
        """What `flatout diagnose` finds in the records. None where there are too few."""
        with suppress(FlatoutError):
            self.diagnosis = diagnosis_of(recorded_evidence(path))

    def values(self, metric: str) -> list[float]:
        """Return the finite values of a metric."""
        curve = self.curves.get(metric)
        return [] if curve is None else curve[-1][np.isfinite(curve[-1])].tolist()


def read_runs(paths: list[Path]) -> list[RunData]:
    """Return the contents of run directories, each with a unique short name."""
    whole = [path.absolute() for path in paths]
    common = os.path.commonpath([path.parent for path in whole])
    return [
        RunData(path, str(at.relative_to(common))) for path, at in zip(paths, whole, strict=True)
    ]


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
