"""The lines about a run's epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flatout.figures import amount, duration

LINES_EVERY_S = 5.0
"""Minimum time between lines; a short text has many epochs per second."""


class Epochs:
    """Says when epochs are done, with time and samples/s where `total` epochs were requested."""

    def __init__(self, done: float, *, total: float | None, last_step: int) -> None:
        self._epoch = int(done)
        self._total, self._last_step = total, last_step
        self._last_line_s = -math.inf
        self._began_s = 0.0
        self._losses: list[float] = []
        self._samples = self._train_s = 0.0
        self._step: float | None = None

    def line(self, record: Mapping[str, float]) -> str | None:
        """Take a line of metrics.jsonl; return the line that is due about epochs, if any."""
        self._count(record)
        epoch = int(record.get("train/epoch", self._epoch))
        now_s = record.get("wall_s", math.inf)
        is_last = self._total is not None and record["step"] >= self._last_step
        if epoch <= self._epoch or not (is_last or now_s - self._last_line_s >= LINES_EVERY_S):
            return None
        mean = sum(self._losses) / len(self._losses) if self._losses else math.nan
        first = self._epoch + 1
        which = f"Epoch {epoch}" if epoch == first else f"Epochs {first} to {epoch}"
        of = "" if self._total is None else f" of {self._total:g}"
        line = (
            f"{which}{of} done at step {record['step']:,.0f}: mean training loss {mean:.4f}"
            + self._pace(now_s)
        )
        self._epoch, self._losses = epoch, []
        self._last_line_s = self._began_s = record.get("wall_s", 0.0)
        self._samples = self._train_s = 0.0
        return line

    def _count(self, record: Mapping[str, float]) -> None:
        if "train/loss" not in record:
            return
        self._losses.append(record["train/loss"])
        steps_per_s, before = record.get("perf/steps_per_s"), self._step
        self._step = record["step"]
        if before is None or not steps_per_s or "perf/samples_per_s" not in record:
            return
        train_s = (record["step"] - before) / steps_per_s
        self._train_s += train_s
        self._samples += record["perf/samples_per_s"] * train_s

    def _pace(self, now_s: float) -> str:
        if self._total is None or not math.isfinite(now_s):
            return ""
        rate = f", {amount(self._samples / self._train_s)} samples/s" if self._train_s else ""
        return f", {duration(now_s - self._began_s)}{rate}"
