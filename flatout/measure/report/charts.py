"""The charts of a report as a Bokeh document, which page.js shows, colours and keeps in step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    LinearAxis,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.plotting import figure
from bokeh.resources import Resources
from bokeh.themes import Theme

from flatout.measure.report.curves import CHARTS, COLUMNS, NOT_DRAWN, Chart, Curve, RunData, outline

NUM_COLORS = 8
"""Colours in page.css. They repeat after that, with other dashes."""
DASHES = {"solid": "", "dashed": "6 4", "dotted": "2 3", "dotdash": "2 3 6 3"}
"""Bokeh's dashes, and those of SVG in a legend."""
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
    color: int
    dash: str


@dataclass(frozen=True)
class Drawn:
    """A chart with what it shows of some runs."""

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]


def drawn_charts(runs: Sequence[RunData]) -> list[Drawn]:
    """Return the charts that have something to show, in the order of the page.

    Metrics that CHARTS does not name have charts of their own, up to a number. A colour stands for
    a metric in a report about one run, and for a run in one about several.
    """
    others = others_in(runs)[:MAX_OTHER_CHARTS]
    every = [*CHARTS, *(Chart(name, "", {name: name.rpartition("/")[2]}) for name in others)]
    found = [
        Drawn(f"chart{at}", chart.title, chart.unit, tuple(_lines(chart, runs)))
        for at, chart in enumerate(every)
    ]
    return [chart for chart in found if chart.lines]


def others_in(runs: Sequence[RunData]) -> list[str]:
    """Return the metrics of the runs that CHARTS does not name, in order."""
    named = NOT_DRAWN.union(*(chart.labels for chart in CHARTS))
    return sorted({name for run in runs for name in run.curves} - named)


def _lines(chart: Chart, runs: Sequence[RunData]) -> Iterator[Line]:
    several, scales = len(runs) > 1, np.array([[1.0], [1.0], [1.0], [chart.scale]])
    for index, run in enumerate(runs):
        for number, (metric, label) in enumerate(chart.labels.items()):
            curve = run.curves.get(metric)
            if curve is None or not np.isfinite(curve[-1]).any():
                continue
            names = [run.name] if len(chart.labels) == 1 else [run.name, label]
            dash = number + index // NUM_COLORS * len(chart.labels)
            yield Line(
                key=f"{index}|{metric}",
                label=" · ".join(names) if several else label or chart.title,
                curve=outline(curve) * scales,
                color=(index if several else number) % NUM_COLORS,
                dash=[*DASHES][dash % len(DASHES)] if several else "solid",
            )


def library() -> str:
    """Return BokehJS as a script: the copy that the Python package contains."""
    resources = Resources(mode="inline", components=["bokeh"], minified=True)
    return resources.js_raw[0]


def charts_json(charts: Sequence[Drawn]) -> dict[str, Any]:
    """Return the document, and what page.js needs to know about its charts.

    Positions of a curve are columns of its data source: `step`, `tokens` and `elapsed_s`.
    """
    x_range = Range1d(start=0, end=1, name="x")
    plots = {chart.key: _plot(chart, x_range) for chart in charts}
    document = Document(theme=Theme(Path(__file__).with_name("page.yaml")))
    for plot in plots.values():
        document.add_root(plot)
    bounds: dict[str, list[float] | None] = {}
    for row, name in enumerate(COLUMNS[:-1]):
        known = np.concatenate([[], *(line.curve[row] for chart in charts for line in chart.lines)])
        known = known[np.isfinite(known)]
        bounds[name] = [float(known.min()), float(known.max())] if len(known) else None
    return {
        "document": json.loads(serialize_json(document.to_json(deferred=False))),
        "charts": [{"key": key, "root": plot.id} for key, plot in plots.items()],
        "bounds": bounds,
    }


def _plot(chart: Drawn, x_range: Range1d) -> figure:
    """Return the plot of one chart, whose look page.yaml, page.css and page.js provide.

    It has a horizontal axis for each position, of which page.js shows one.
    """
    zoom = BoxZoomTool(dimensions="width")
    options: dict[str, Any] = {"x_range": x_range, "x_axis_location": None, "window_axis": "x"}
    plot = figure(height=220, tools=[zoom], active_drag=zoom, **options)
    forms = zip(COLUMNS, ("0.[000000]a", "0.[000000]a", "00:00:00"), strict=False)
    for name, form in forms:
        axis: Any = LinearAxis(name=name)
        axis.formatter = NumeralTickFormatter(format=form)
        plot.add_layout(axis, "below")
    plot.xgrid.grid_line_color = None
    for line in chart.lines:
        columns = dict(zip(COLUMNS, line.curve, strict=True))
        small = {name: columns[name].astype(np.float32) for name in ("elapsed_s", "value")}
        source = ColumnDataSource(columns | small, name=f"{line.key}|curve")
        look: dict[str, Any] = {"source": source, "name": line.key, "tags": [f"c{line.color}"]}
        if line.curve.shape[1] > 1:
            plot.line("step", "value", line_width=2, line_dash=line.dash, **look)
        if line.curve.shape[1] <= SPARSE:
            plot.scatter("step", "value", size=5, line_color=None, **look)
    return plot
