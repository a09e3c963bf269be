"""Records of a watched loop: lines of metrics.jsonl that `flatout report` reads."""

from __future__ import annotations

import math
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flatout.errors import OutputInUse
from flatout.measure.diagnose.diagnosis import Diagnosis
from flatout.measure.report.curves import RunData
from flatout.measure.report.page import render
from flatout.measure.steps.windows import Totals
from flatout.storage.files import write_text
from flatout.storage.json_io import append_line
from flatout.training.metrics.phases import PhaseTimer
from flatout.training.metrics.readback import DelayedReadback
from flatout.training.run_dir.layout import METRICS

MOST_KEPT = 20_000
"""Records that are kept for a report of a loop without a run directory: the last ones."""
NAMES = {
    "loss": "train/loss",
    "train_loss": "train/loss",
    "lr": "train/lr",
    "learning_rate": "train/lr",
    "grad_norm": "train/grad_norm",
    "epoch": "train/epoch",
    "val_loss": "val/loss",
    "eval_loss": "val/loss",
}
"""Usual names of metrics, and what they are called in metrics.jsonl."""


class LoopRecords:
    """Averages over `every` steps, with the metrics that the loop logs.

    Tensors are copied when they are logged and read one record later, so that nothing waits.
    """

    def __init__(self, folder: Path | None, *, every: int, tokens_per_step: int | None) -> None:
        self.losses: deque[tuple[int, float]] = deque(maxlen=MOST_KEPT)
        """(step, loss), as logged."""
        self.grad_norms: deque[tuple[int, float]] = deque(maxlen=MOST_KEPT)
        """(step, norm of the gradient), as logged."""
        self._folder, self._every, self._tokens = folder, every, tokens_per_step
        self._readback = DelayedReadback()
        self._kept: deque[Mapping[str, Any]] = deque(maxlen=MOST_KEPT)
        self._began_s = time.perf_counter()
        self._totals = Totals()
        """Of the steps since the last record."""
        self._read: dict[int, dict[str, float]] = {}
        self._due: dict[str, float] | None = None
        """The last record, which waits for tensors that have not arrived."""

    def add(self, step: int, seconds: float, timer: PhaseTimer) -> None:
        """Add a step that has ended, and write a record when one is due."""
        self._totals.add(seconds, timer)
        if self._totals.steps >= self._every:
            self._write_due()
            self._due = self._record(step)
            self._totals = Totals()

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Keep metrics of a step for its record.

        Shapes: each tensor has one element.
        """
        tensors = {}
        for name, value in figures.items():
            name = NAMES.get(name, name if "/" in name else f"train/{name}")
            if isinstance(value, torch.Tensor):
                tensors[name] = value.detach().reshape(())
            else:
                self._read.setdefault(step, {})[name] = float(value)
        if tensors:
            self._readback.push(step, tensors, due=True)

    def flush(self) -> None:
        """Write what is left."""
        self._write_due(flush=True)
        if self._read:
            self._write({"step": max(self._read), **self._position()})

    def report(self, path: Path, diagnosis: Diagnosis, *, name: str) -> None:
        """Write the HTML page.

        Raises: OSError when the disk fails.
        """
        self.flush()
        if self._folder is not None:
            html = render([RunData(self._folder, name)])
        else:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                for record in self._kept:
                    append_line(folder / METRICS, record)
                diagnosis.write(folder)
                html = render([RunData(folder, name)])
        write_text(path, html)

    def _position(self) -> dict[str, float]:
        elapsed_s = round(time.perf_counter() - self._began_s, 3)
        return {"wall_s": elapsed_s, "elapsed_s": elapsed_s}

    def _record(self, step: int) -> dict[str, float]:
        seconds, steps = self._totals.seconds, self._totals.steps
        record: dict[str, float] = {"step": step, **self._position()}
        if self._tokens is not None:
            record["tokens"] = step * self._tokens
            record["perf/tokens_per_s"] = steps * self._tokens / seconds
        record["perf/step_ms"] = 1e3 * seconds / steps
        record["perf/steps_per_s"] = steps / seconds
        record["perf/data_wait_ms"] = 1e3 * self._totals.phases["data_wait"] / steps
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            record["mem/allocated_gib"] = torch.cuda.memory_allocated() / 2**30
            record["mem/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return record

    def _write_due(self, *, flush: bool = False) -> None:
        """Read the tensors that have arrived, and write the record that waits for them."""
        for step, figures in self._readback.ready(flush=flush):
            self._read.setdefault(step, {}).update(figures)
        if self._due is not None:
            self._write(self._due)
        self._due = None

    def _write(self, record: dict[str, float]) -> None:
        """Write a record with the last metrics logged up to its step."""
        for logged in sorted(number for number in self._read if number <= record["step"]):
            figures = self._read.pop(logged)
            for name, kept in (("train/loss", self.losses), ("train/grad_norm", self.grad_norms)):
                if name in figures:
                    kept.append((logged, figures[name]))
            record |= figures
        finite = {name: value for name, value in record.items() if math.isfinite(value)}
        self._kept.append(finite)
        if self._folder is not None:
            append_line(self._folder / METRICS, finite)


def new_folder(folder: Path | str) -> Path:
    """Create the directory of a loop's records and return it.

    Raises: OutputInUse when it has records already.
    """
    folder = Path(folder)
    if folder.is_file():
        raise OutputInUse(f"{folder} is a file.", fix="Name a new directory.")
    if (folder / METRICS).exists():
        raise OutputInUse(
            f"{folder} contains the records of another run.",
            fix="Name a new directory, or delete that one.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder
