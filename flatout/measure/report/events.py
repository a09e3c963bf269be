"""The events of runs: where they stand on the charts' axis, and what they say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.measure.report.charts import NUM_COLORS
from flatout.measure.report.curves import Curve, RunData

KINDS = {
    "start": "start",
    "resume": "start",
    "longer": "start",
    "save": "save",
    "save_failed": "save",
    "skip": "skip",
    "bad_step": "skip",
    "rewind": "start",
    "compiled": "compile",
    "recompiled": "compile",
    "alarm": "alarm",
    "alarm_over": "alarm",
    "smaller_batch": "alarm",
    "refused": "alarm",
    "stall": "alarm",
    "stall_over": "alarm",
    "sample": "sample",
    "evaluation": "score",
    "stop": "end",
    "early_stop": "end",
    "end": "end",
}
"""Events that stand on the axis, and the row of each; the others are in the table only."""
ROWS = ("start", "save", "sample", "score", "compile", "skip", "alarm", "end")
MAX_MARKS = 400
"""Marks of one kind in one run; of more, evenly spaced ones are drawn."""
LONGEST_TEXT = 200


@dataclass(frozen=True)
class Marks:
    """The events of one kind in one run."""

    key: str
    kind: str
    color: int
    offset: float
    """Height within its row, from -0.5 to 0.5: marks of several runs do not hide each other."""
    at: Curve
    """Their positions; the values are not used."""
    texts: tuple[str, ...]


def marks_of(runs: Sequence[RunData]) -> list[Marks]:
    """Return the marks of all runs, in the order of their rows."""
    found = [mark for index, run in enumerate(runs) for mark in _marks(index, run, len(runs))]
    return sorted(found, key=lambda mark: ROWS.index(mark.kind))


def _marks(index: int, run: RunData, num_runs: int) -> Iterator[Marks]:
    by_row: dict[str, list[Mapping[str, Any]]] = {}
    for event in run.events:
        row = KINDS.get(str(event.get("event")))
        if row is not None and _is_step(event.get("step")):
            by_row.setdefault(row, []).append(event)
    for row, events in by_row.items():
        every = math.ceil(len(events) / MAX_MARKS)
        events = events[::every]
        steps = np.array([float(event["step"]) for event in events])
        prefix = f"{run.name}: " if num_runs > 1 else ""
        yield Marks(
            key=f"events|{index}|{row}",
            kind=row,
            color=index % NUM_COLORS if num_runs > 1 else 0,
            offset=0.6 * ((num_runs - 1) / 2 - index) / num_runs,
            at=Curve(
                step=steps,
                tokens=_between(steps, run.longest, "tokens"),
                elapsed_s=_between(steps, run.longest, "elapsed_s"),
                value=steps,
            ),
            texts=tuple(prefix + described(event) for event in events),
        )


def described(event: Mapping[str, Any]) -> str:
    """Return one line about an event: its step, its kind and its figures."""
    kind = str(event.get("event"))
    if kind == "sample":
        details = str(event.get("text", "")).strip().partition("\n")[0]
    else:
        details = ", ".join(_details(event))
    step = f"step {event['step']:,}: " if _is_step(event.get("step")) else ""
    text = f"{step}{kind}" + (f": {details}" if details else "")
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."


def _details(event: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of an event that have a value; `end` repeats the summary and has none."""
    if event.get("event") == "end":
        return
    for name, value in event.items():
        if name in {"event", "time", "step", "wall_s", "environment"} or value in (None, [], ""):
            continue
        yield f"{name} {value}" if name not in {"reason", "text", "cause"} else str(value)


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _between(steps: Iterable[float], known: Curve | None, name: str) -> Any:
    """Return the tokens or the time at `steps`, interpolated between the records."""
    steps = np.asarray(steps)
    if known is None:
        return np.full(len(steps), np.nan)
    return np.interp(steps, known.step, getattr(known, name))
