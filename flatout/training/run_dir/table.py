"""The metrics of a run as a table. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from flatout.json_io import JsonObject
from flatout.training.run_dir.layout import read_records
from flatout.training.run_dir.lookup import run_or_newest

Table = dict[str, list[float | None]]
"""Columns by name, all of one length; None where nothing was measured."""


def metrics(run: str | Path | None = None) -> Table:
    """Return the metrics of a run as columns, for `pandas.DataFrame(flatout.metrics(run))`.

    Each row is a line of metrics.jsonl: `step` and the other positions, then the figures that were
    measured at that step. Training and evaluation at one step are two rows, and figures that a row
    lacks are None.

    Raises: CheckpointError when there is no such run; for None, the newest run with a checkpoint.
    """
    return columns(read_records(run_or_newest(run)))


def columns(records: Iterable[Mapping[str, float] | JsonObject]) -> Table:
    """Return records as columns, in the order in which the names first appear."""
    rows = list(records)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
