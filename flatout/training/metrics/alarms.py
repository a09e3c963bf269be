"""Alarms of a run: throughput, memory or loss has left its usual range and stays outside.

An alarm is an event `alarm`, its end an event `alarm_over`. There is one per episode. They come
from the metrics of the run's records, so that a step pays nothing for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from flatout.errors import in_shell
from flatout.storage.json_io import JsonObject

RECENT, MOST = 8, 6
"""A change stays when MOST of the last RECENT values have it."""
USUAL, LEAST = 64, 16
"""Most and fewest earlier values that they are compared with."""
WARM_UP = 32
"""First values of a run, in which the memory grows and the rate settles."""
SAMPLE_S = 1.25
"""Least time between two values, so that no change shorter than 7.5 s counts."""
DEVIATIONS = 4 * 1.4826
"""Median absolute deviations above the median that are unusual: 4 standard deviations."""


class Series(NamedTuple):
    """A metric in which an alarm is sought."""

    kind: str
    """Of its alarms."""
    metric: str
    worse: int
    """1 if higher is worse, -1 if lower is."""
    margin: float
    """Smallest change that counts, in the logarithm."""
    name: str
    shown: str
    """How a value is written."""


SERIES = (
    Series("throughput", "perf/tokens_per_s", -1, 0.08, "Throughput", "{:,.0f} tokens/s"),
    Series("memory", "mem/allocated_gib", 1, 0.1, "The GPU memory of this run", "{:.2f} GiB"),
    Series("host_memory", "mem/process_gib", 1, 0.1, "The memory of this process", "{:.2f} GiB"),
    Series("loss", "train/loss", 1, 0.03, "The training loss", "{:.3f}"),
)


class Shift(NamedTuple):
    """A series that has left its usual level, or has returned to it. In the logarithm."""

    since_step: int
    usual: float
    now: float
    is_over: bool


class Level:
    """Compares a series, where higher is worse, with the lowest median of a window so far."""

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._earlier: deque[float] = deque(maxlen=USUAL)
        self._num_seen = 0
        self._usual, self._reach = math.inf, 0.0
        self._since: int | None = None
        """Step at which the change that is not over began."""

    def see(self, step: int, value: float) -> Shift | None:
        """Take the next value, and return a change that begins or is over with it."""
        self._num_seen += 1
        if self._num_seen <= WARM_UP:
            return None
        if len(self._recent) == RECENT and self._since is None:
            self._learn(self._recent[0][1])
        self._recent.append((step, value))
        limit = self._usual + self._reach / (1 if self._since is None else 2)
        outside = [at for at, each in self._recent if each > limit]
        now = median(each for _, each in self._recent)
        if self._since is None and len(outside) >= MOST:
            self._since = outside[0]
            return Shift(self._since, self._usual, now, is_over=False)
        if self._since is not None and len(outside) <= RECENT - MOST:
            since, self._since = self._since, None
            return Shift(since, self._usual, now, is_over=True)
        return None

    def _learn(self, value: float) -> None:
        if value > self._usual + self._reach:
            return
        self._earlier.append(value)
        if len(self._earlier) >= LEAST:
            middle = median(self._earlier)
            spread = median(abs(each - middle) for each in self._earlier)
            self._usual = min(self._usual, middle)
            self._reach = max(self._margin, DEVIATIONS * spread)


class Alarms:
    """Watches the records of a run, and reports when something gets worse."""

    def __init__(self, run_folder: Path) -> None:
        self._levels = [(series, Level(series.margin)) for series in SERIES]
        self._taken_s = -math.inf
        self._advice = f"`flatout diagnose {in_shell(run_folder)}` finds the cause."

    def see(self, record: Mapping[str, float]) -> list[JsonObject]:
        """Take a line of metrics.jsonl, and return the alarms that begin or are over with it."""
        wall_s = record.get("wall_s", 0.0)
        if "train/lr" not in record or wall_s < self._taken_s + SAMPLE_S:
            return []
        self._taken_s = wall_s
        step, found = int(record["step"]), []
        for series, level in self._levels:
            value = record.get(series.metric, 0.0)
            if value <= 0:  # not measured
                continue
            change = level.see(step, series.worse * math.log(value))
            if change is not None:
                found.append(self._event(series, step, change))
        return found

    def _event(self, series: Series, step: int, change: Shift) -> JsonObject:
        usual, now = (math.exp(series.worse * each) for each in (change.usual, change.now))
        was, is_ = series.shown.format(usual), series.shown.format(now)
        begun = f"{series.name} went from {was} to {is_} at step {change.since_step:,}"
        over = f"{series.name} is back at {is_} at step {step:,}."
        return {
            "event": "alarm_over" if change.is_over else "alarm",
            "kind": series.kind,
            "step": step,
            "since_step": change.since_step,
            "usual": usual,
            "now": now,
            "text": over if change.is_over else f"{begun}. {self._advice}",
        }
