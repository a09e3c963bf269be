"""The page: one HTML file that needs nothing else, and runs no script but its own."""

from __future__ import annotations

import base64
import datetime
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from flatout.measure.report import figures, results, sections
from flatout.measure.report.charts import NUM_COLORS, DrawnChart, Line, drawn_charts
from flatout.measure.report.events import Marks, marks_of
from flatout.measure.report.reading import RunData
from flatout.measure.report.sampling import INTERVALS, TREND_INTERVALS
from flatout.measure.report.values import escape, number

MARK = "<!doctype html><!-- flatout report -->"
"""The first characters of a report, by which a file is known as one."""
SECTIONS: Mapping[str, tuple[str, Callable[[Sequence[RunData]], str]]] = {
    "time": ("Where the time of a step goes", results.time_of_steps),
    "plan": ("Plan and reality", sections.plan),
    "findings": ("Findings", sections.findings),
    "samples": ("Samples", sections.samples),
    "events": ("Events", sections.events),
    "settings": ("Settings", results.settings),
}
"""The sections below the charts, by their key: the title, and what returns the contents."""
FOLDED = {"events", "settings"}
"""Long sections, closed until the reader opens them."""
LIVE = '<p id="live" role="status">live</p>'
HOW_DRAWN = (
    f"Curves of more than {2 * INTERVALS:,} records are drawn from the lowest and the highest "
    f"point of each of {INTERVALS} intervals, so that no peak is lost. The stronger line over a "
    f"long curve is its mean in each of {TREND_INTERVALS} intervals. Tables use every record."
)


def render(runs: Sequence[RunData], *, live: str | None = None) -> str:
    """Return the page about `runs`.

    With `live`, the version of the files that it shows, it asks its server for newer ones.

    Text from the runs appears as text only: it is escaped in HTML, is never a script's source, and
    the page's Content-Security-Policy allows only the scripts whose hashes it lists.
    """
    charts, marks = drawn_charts(runs), marks_of(runs)
    data = figures.charts_json(charts, marks)
    data["marks"] = {mark.key: mark.texts for mark in marks}
    data["structure"] = structure(runs, charts, marks)
    data["version"] = live
    scripts = [_in_script(text) for text in (figures.library(), _resource("page.js"))]
    allowed = policy(scripts, connect="'self'" if live else "'none'")
    names = ", ".join(run.name for run in runs)
    return "\n".join(
        [
            f'{MARK}\n<html lang="en" data-live="{"yes" if live else ""}">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{allowed}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(names)} · flatout</title>",
            f"<style>{_resource('page.css')}</style>",
            "</head>",
            "<body>",
            _header(runs, status=LIVE if live else ""),
            "<main>",
            *_main(runs, charts, marks),
            "</main>",
            f'<script type="application/json" id="data">{_in_json(data)}</script>',
            *(f"<script>{text}</script>" for text in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


def policy(scripts: Sequence[str], *, connect: str) -> str:
    """Return the Content-Security-Policy: these scripts, inline styles, and nothing from outside.

    `connect` is what the page may ask: a live one asks its own server.
    """
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def structure(
    runs: Sequence[RunData], charts: Sequence[DrawnChart], marks: Sequence[Marks]
) -> list[Any]:
    """Return what a page must have in common with a newer one to be updated instead of reloaded."""
    lines = [line.key for drawn in charts for line in drawn.lines]
    trends = [line.trend is not None for drawn in charts for line in drawn.lines]
    return [[run.name for run in runs], lines, trends, [mark.key for mark in marks]]


def _header(runs: Sequence[RunData], *, status: str) -> str:
    names = "".join(
        f'<li><span class="dot c{index % NUM_COLORS}"></span>{escape(run.name)} '
        f'<span class="state">{escape(run.state)}</span></li>'
        for index, run in enumerate(runs)
    )
    axes = "".join(
        f'<label><input type="radio" name="axis" value="{value}"{checked}>{label}</label>'
        for value, label, checked in (
            ("step", "steps", " checked"),
            ("tokens", "tokens", ""),
            ("elapsed_s", "time", ""),
        )
    )
    return (
        f'<header><h1>flatout report</h1><ul class="runs" data-live id="runs">{names}</ul>{status}'
        f'<div class="controls"><fieldset id="axis"><legend>Against</legend>{axes}</fieldset>'
        '<button id="reset" type="button">Whole run</button>'
        '<button id="theme" type="button" aria-label="Switch between light and dark">◐</button>'
        "</div></header>"
    )


def _main(
    runs: Sequence[RunData],
    charts: Sequence[DrawnChart],
    marks: Sequence[Marks],
) -> Iterator[str]:
    """Yield the sections of the page, without those that have nothing to say."""
    yield _section("notes", "Notes", _notes(runs))
    yield f'<div class="beside"><section id="results" data-live>{results.results(runs)}</section>'
    if len(runs) > 1:
        yield _section("differences", "Differences", results.differences(runs))
    yield "</div>"
    yield _charts(charts, marks)
    for key, (title, contents) in SECTIONS.items():
        yield _section(key, title, contents(runs))
    yield _section("about", "About this page", _about(runs))


def _section(key: str, title: str, content: str) -> str:
    """Return a section; an empty one stays hidden, so that a live page can fill it."""
    hidden = "" if content else " hidden"
    if key in FOLDED:
        content = (
            f'<details id="{key}-details"><summary><h2>{title}</h2></summary>{content}</details>'
        )
    else:
        content = f"<h2>{title}</h2>{content}"
    return f'<section id="{key}" data-live{hidden}>{content}</section>'


def _notes(runs: Sequence[RunData]) -> str:
    lines = [
        f"<li>{escape(f'{run.name}: {note}' if len(runs) > 1 else note)}</li>"
        for run in runs
        for note in run.notes
    ]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _charts(charts: Sequence[DrawnChart], marks: Sequence[Marks]) -> str:
    """Return a figure for each chart: its title and legend; page.js adds the plot."""
    shown = [
        f'<figure data-chart="{escape(drawn.chart.key)}"><figcaption><h2>'
        f"{escape(drawn.chart.title)}</h2> <small>{escape(drawn.chart.unit)}</small></figcaption>"
        f'<ul class="legend">{"".join(map(_legend, drawn.lines))}</ul>'
        f"{_plot(drawn.chart.title)}</figure>"
        for drawn in charts
    ]
    if marks:
        at = 1 if charts and charts[0].chart.key == "loss" else 0
        shown.insert(
            at,
            '<figure data-chart="events"><figcaption><h2>Events</h2></figcaption>'
            f'{_plot("Events")}<p class="said" aria-live="polite"></p></figure>',
        )
    keys = (
        '<p class="keys">Drag across a chart to zoom in, double-click to zoom out. With a chart '
        "selected by Tab: <kbd>←</kbd> <kbd>→</kbd> move the cursor, <kbd>+</kbd> <kbd>-</kbd> "
        "zoom, <kbd>0</kbd> shows the whole run. The buttons of a legend hide lines.</p>"
    )
    script = '<noscript><p class="note">The charts need JavaScript.</p></noscript>'
    return f'<section id="charts">{"".join(shown)}{script}{keys if shown else ""}</section>'


def _plot(title: str) -> str:
    return (
        f'<div class="plot" tabindex="0" role="application" aria-label="{escape(title)}: chart">'
        '<div class="cursor" hidden></div></div>'
    )


def _legend(line: Line) -> str:
    dashes = {"solid": "", "dashed": "6 4", "dotted": "2 3", "dotdash": "2 3 6 3"}
    return (
        f'<li><button type="button" aria-pressed="true" data-line="{escape(line.key)}">'
        f'<svg width="22" height="8" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" '
        f'class="c{line.color}" stroke-dasharray="{dashes[line.dash]}"/></svg>'
        f"{escape(line.label)} <output></output></button></li>"
    )


def _about(runs: Sequence[RunData]) -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    version = importlib.import_module("flatout").__version__
    read = ", ".join(f"{escape(run.path)} ({number(run.num_records)} records)" for run in runs)
    return f"<p>{HOW_DRAWN}</p><p>flatout {version}, {now}; from {read}.</p>"


def _resource(name: str) -> str:
    return resources.files("flatout.measure.report").joinpath(name).read_text(encoding="utf-8")


def _in_script(text: str) -> str:
    """Return a script of ours or Bokeh's without what would end its element."""
    return text.replace("</script", "<\\/script")


def _in_json(document: Any) -> str:
    """Return JSON for a script element: no character in it can end the element or open another."""
    text = json.dumps(document, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
