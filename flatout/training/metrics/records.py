"""A run's records: the lines of metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from flatout.files import open_own, write_text
from flatout.training.run_dir.layout import METRICS


class Records:
    """Writes the records of a run that starts at or resumes from `step`, on its main rank."""

    def __init__(self, run_folder: Path, step: int) -> None:
        path = run_folder / METRICS
        self.train_loss = _drop_later_steps(path, step) if path.exists() else None
        """The training loss of the last record before this process; None if there is none."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._metrics = os.fdopen(open_own(path, flags), "a", encoding="utf-8")

    def write(self, record: Mapping[str, float]) -> dict[str, float]:
        """Write a record without its non-finite figures, which JSON cannot represent; return it."""
        record = {name: value for name, value in record.items() if math.isfinite(value)}
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        return record

    def close(self) -> None:
        """Close the file."""
        self._metrics.close()


def _drop_later_steps(path: Path, step: int) -> float | None:
    """Remove the lines after `step` from metrics.jsonl; return the last remaining training loss."""
    with os.fdopen(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
        kept = [line for line in file.read().splitlines() if _step_of(line) <= step]
    write_text(path, "".join(line + "\n" for line in kept))
    losses = (json.loads(line).get("train/loss") for line in reversed(kept))
    return next((loss for loss in losses if loss is not None), None)


def _step_of(line: str) -> float:
    """Return the step of a metrics line; infinity for a line truncated by a crash."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
