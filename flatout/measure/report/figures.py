"""The charts as a Bokeh document, which page.js shows, colours and keeps in step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from bokeh.models import (
    AdaptiveTicker,
    BoxZoomTool,
    ColumnDataSource,
    LinearAxis,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
)
from bokeh.plotting import figure
from bokeh.resources import Resources
from bokeh.themes import Theme

from flatout.measure.report.charts import Chart, Line, Marks
from flatout.measure.report.curves import POSITIONS, Curve

HEIGHT, EVENTS_ROW = 220, 22
FAINT = 0.35
"""Opacity of a curve that its trend is drawn over."""


def library() -> str:
    """Return BokehJS as a script: the copy that the Python package contains."""
    resources = Resources(mode="inline", components=["bokeh"], minified=True)
    return "\n".join(resources.js_raw[:1])


def charts_json(charts: Sequence[Chart], marks: Sequence[Marks]) -> dict[str, Any]:
    """Return the document, and what page.js needs to know about its charts.

    Positions of a curve are columns of its data source: `step`, `tokens` and `elapsed_s`.
    """

    x_range = Range1d(start=0, end=1, name="x")
    plots = {chart.key: _plot(chart, x_range) for chart in charts}
    if marks:
        plots["events"] = _events_plot(marks, x_range)
    document = Document(theme=Theme(Path(__file__).with_name("page.yaml")))
    for plot in plots.values():
        document.add_root(plot)
    curves = [line.curve for chart in charts for line in chart.lines]
    return {
        "document": json.loads(serialize_json(document.to_json(deferred=False))),
        "charts": [{"key": key, "root": plot.id} for key, plot in plots.items()],
        "bounds": {name: _bounds(curves, name) for name in POSITIONS},
    }


def _plot(chart: Chart, x_range: Range1d) -> figure:
    """Return the plot of one chart: each curve, and over it its trend."""
    plot = _empty_plot(HEIGHT, x_range=x_range, window_axis="x")
    if ticks := chart.ticks:
        form = PrintfTickFormatter if ticks.startswith("%") else NumeralTickFormatter
        plot.yaxis.formatter = form(format=ticks)
    for line in chart.lines:
        alpha = 1.0 if line.trend is None else FAINT
        _draw(plot, f"{line.key}|curve", line, line.curve, alpha=alpha)
        if line.trend is not None:
            _draw(plot, f"{line.key}|trend", line, line.trend, alpha=1.0)
    return plot


def _draw(plot: figure, name: str, line: Line, curve: Curve, *, alpha: float) -> None:
    options: dict[str, Any] = {
        "source": _source(name, curve, curve.value.astype(np.float32)),
        "name": line.key,
        "tags": [f"c{line.color}"],
    }
    if len(curve.value) > 1:
        width = 2 if alpha == 1.0 else 1
        plot.line(
            "step", "value", line_width=width, line_alpha=alpha, line_dash=line.dash, **options
        )
    if line.has_markers:
        plot.scatter("step", "value", size=5, fill_alpha=alpha, line_color=None, **options)


def _source(name: str, at: Curve, value: Any) -> Any:
    """Return the values at the positions of a curve."""
    columns = {
        "step": at.step,
        "tokens": at.tokens,
        "elapsed_s": at.elapsed_s.astype(np.float32),
        "value": value,
    }
    return ColumnDataSource(columns, name=name)


def _events_plot(marks: Sequence[Marks], x_range: Range1d) -> figure:
    """Return the plot of the events: a row for each kind."""
    kinds = list(dict.fromkeys(mark.kind for mark in marks))
    height = 40 + EVENTS_ROW * len(kinds)
    plot = _empty_plot(height, x_range=x_range, y_range=kinds[::-1])
    for mark in marks:
        value = [(mark.kind, mark.offset)] * len(mark.at.step)
        is_trouble = mark.kind in {"alarm", "skip"}
        options: dict[str, Any] = {
            "source": _source(f"{mark.key}|marks", mark.at, value),
            "name": mark.key,
            "marker": "diamond" if is_trouble else "circle",
            "size": 12 if is_trouble else 8,
            "tags": ["alarm" if is_trouble else f"c{mark.color}"],
        }
        plot.scatter("step", "value", fill_alpha=0.8, line_color=None, **options)
    return plot


def _empty_plot(height: int, **options: Any) -> figure:
    """Return a plot whose look page.yaml, page.css and page.js provide.

    It has a horizontal axis for each position, of which page.js shows one.
    """

    zoom = BoxZoomTool(dimensions="width")
    plot = figure(height=height, tools=[zoom], active_drag=zoom, x_axis_location=None, **options)
    for name, form in (("step", "0.[000]a"), ("tokens", "0.[00]a"), ("elapsed_s", "00:00:00")):
        axis: Any = LinearAxis(name=name)
        axis.formatter = NumeralTickFormatter(format=form)
        plot.add_layout(axis, "below")
    plot.xaxis[-1].ticker = AdaptiveTicker(base=60, mantissas=[1, 2, 5, 10, 15, 30], min_interval=1)
    plot.xgrid.grid_line_color = None
    return plot


def _bounds(curves: Iterable[Curve], name: str) -> list[float] | None:
    """Return the lowest and highest position of all curves. None when no record has one."""
    known = np.concatenate([np.empty(0), *(getattr(curve, name) for curve in curves)])
    known = known[np.isfinite(known)]
    return [float(known.min()), float(known.max())] if len(known) else None
