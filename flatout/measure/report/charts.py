"""What a report draws: charts with the curves of runs, sampled, and the events on their axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flatout.measure.report.curves import Curve, RunData, outline, trend

NUM_COLORS = 8
"""Colours in page.css. They repeat after that."""
DASHES = ("solid", "dashed", "dotted", "dotdash")
MAX_OTHER_CHARTS = 12
"""Charts of metrics that this file does not name. A run from elsewhere may have thousands."""
SPARSE = 60
"""Curves of up to this many points are drawn with a marker at each."""


@dataclass(frozen=True)
class Line:
    """One curve in a chart."""

    key: str
    """Different for each line of a report."""
    label: str
    curve: Curve
    trend: Curve | None
    color: int
    dash: str
    has_markers: bool


@dataclass(frozen=True)
class Chart:
    """One chart: metrics of metrics.jsonl that share a unit."""

    key: str
    title: str
    unit: str
    figures: Mapping[str, str]
    """Name in metrics.jsonl to label."""
    scale: float = 1.0
    """Values are multiplied by this."""
    has_trend: bool = True
    """Whether long curves get their trend. Not for a planned curve, which has no noise."""
    ticks: str = ""
    """The vertical axis in Bokeh's numeral or printf format. Empty for its usual ticks."""
    lines: tuple[Line, ...] = ()
    """What it shows of some runs."""


CHARTS = (
    Chart("loss", "Loss", "nats per token", {"train/loss": "training", "val/loss": "validation"}),
    Chart(
        "throughput", "Throughput", "tokens/s", {"perf/tokens_per_s": "tokens/s"}, ticks="0.[00]a"
    ),
    Chart("mfu", "Model FLOPs utilisation", "% of the peak", {"perf/mfu": "MFU"}, scale=100),
    Chart(
        "step",
        "Time of a step",
        "ms",
        {
            "perf/step_ms": "step",
            "perf/device_ms": "device",
            "perf/host_ms": "host",
            "perf/data_wait_ms": "waiting for data",
        },
    ),
    Chart("wait", "Waiting for data", "% of the step", {"data wait": "share"}, scale=100),
    Chart(
        "memory",
        "Memory",
        "GiB",
        {
            "mem/peak_gib": "peak",
            "mem/allocated_gib": "allocated",
            "mem/reserved_gib": "reserved",
            "mem/process_gib": "process",
        },
    ),
    Chart("norm", "Gradient norm", "before clipping", {"train/grad_norm": "norm"}),
    Chart(
        "lr",
        "Learning rate",
        "",
        {"train/lr": "learning rate"},
        has_trend=False,
        ticks="%.1e",
    ),
    Chart("others", "Other processes", "cores", {"cpu/other_cores": "busy"}),
    Chart("gpu", "GPU utilisation", "%", {"gpu/util_pct": "utilisation"}),
    Chart("power", "GPU power", "W", {"gpu/power_w": "power"}),
)
NOT_DRAWN = {"cpu/cores", "train/epoch", "perf/samples_per_s", "perf/steps_per_s"}
"""Metrics that repeat the shape of another chart."""
EVENTS = {
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
"""Events drawn on the axis, and the row of each. The others are in the table only."""
ROWS = ("start", "save", "sample", "score", "compile", "skip", "alarm", "end")
MAX_MARKS = 400
"""Marks of one kind in one run. Of more, evenly spaced ones are drawn."""
LONGEST_LINE = 200
"""Characters shown of one event."""


@dataclass(frozen=True)
class Marks:
    """The events of one kind in one run."""

    key: str
    kind: str
    color: int
    offset: float
    """Height within its row, from -0.5 to 0.5: marks of several runs do not hide each other."""
    at: Curve
    """Their positions. The values are not used."""
    texts: tuple[str, ...]


def drawn_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return the charts that have something to show, in the order of the page.

    A colour stands for a metric in a report about one run, and for a run in one about several.
    """
    curves = [dict(run.curves) | _shares(run.curves) for run in runs]
    charts = (*CHARTS, *_other_charts(curves))
    found = [replace(chart, lines=tuple(_lines(chart, runs, curves))) for chart in charts]
    return [chart for chart in found if chart.lines]


def _lines(
    chart: Chart, runs: Sequence[RunData], curves: Sequence[Mapping[str, Curve]]
) -> Iterator[Line]:
    several = len(runs) > 1
    for index, (run, known) in enumerate(zip(runs, curves, strict=True)):
        for number, (figure, label) in enumerate(chart.figures.items()):
            curve = known.get(figure)
            if curve is None or not np.isfinite(curve.value).any():
                continue
            curve = replace(curve, value=curve.value * chart.scale)
            names = [run.name] if several and len(chart.figures) == 1 else [run.name, label]
            yield Line(
                key=f"{index}|{figure}",
                label=" · ".join(names if several else [label]),
                curve=outline(curve),
                trend=trend(curve) if chart.has_trend else None,
                color=(index if several else number) % NUM_COLORS,
                dash=DASHES[number % len(DASHES)] if several else "solid",
                has_markers=len(curve.value) <= SPARSE,
            )


def _shares(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the share of each step that waits for data, where both times were recorded."""
    wait, step = curves.get("perf/data_wait_ms"), curves.get("perf/step_ms")
    if wait is None or step is None or len(wait.value) != len(step.value):
        return {}
    share = np.divide(
        wait.value, step.value, out=np.full(len(step.value), np.nan), where=step.value > 0
    )
    return {"data wait": replace(wait, value=share)}


def _other_charts(curves: Sequence[Mapping[str, Curve]]) -> list[Chart]:
    """Return charts for the metrics that CHARTS does not name: val/loss/NAME, a user's own."""
    known = NOT_DRAWN.union(*(chart.figures for chart in CHARTS))
    names = sorted({name for each in curves for name in each} - known)
    return [
        Chart(f"other{number}", name, "", {name: name.rpartition("/")[2]})
        for number, name in enumerate(names[:MAX_OTHER_CHARTS])
    ]


def marks_of(runs: Sequence[RunData]) -> list[Marks]:
    """Return the marks of all runs, in the order of their rows."""
    found = [mark for index, run in enumerate(runs) for mark in _marks(index, run, len(runs))]
    return sorted(found, key=lambda mark: ROWS.index(mark.kind))


def _marks(index: int, run: RunData, num_runs: int) -> Iterator[Marks]:
    by_row: dict[str, list[Mapping[str, Any]]] = {}
    for event in run.events:
        row = EVENTS.get(str(event.get("event")))
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
    """Return one line about an event: its step, its kind and its metrics."""
    kind = str(event.get("event"))
    if kind == "sample":
        details = str(event.get("text", "")).strip().partition("\n")[0]
    else:
        details = ", ".join(_details(event))
    step = f"step {event['step']:,}: " if _is_step(event.get("step")) else ""
    text = f"{step}{kind}" + (f": {details}" if details else "")
    return text if len(text) <= LONGEST_LINE else text[: LONGEST_LINE - 3] + "..."


def _details(event: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of an event that have a value. `end` repeats the summary and has none."""
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
