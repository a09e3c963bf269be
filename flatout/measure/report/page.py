"""The page: one HTML file that needs nothing else, and runs no script but its own."""

from __future__ import annotations

import base64
import datetime
import hashlib
import importlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from flatout.measure.report import figures, sections
from flatout.measure.report.charts import NUM_COLORS, drawn_charts
from flatout.measure.report.curves import INTERVALS, TREND_INTERVALS, RunData
from flatout.measure.report.events import described, marks_of

MARK = "<!doctype html><!-- flatout report -->"
"""The first characters of a report, by which a file is known as one."""
MAX_EVENTS = 500
"""Events of one run in the table: the last ones."""
DASHES = {"solid": "", "dashed": "6 4", "dotted": "2 3", "dotdash": "2 3 6 3"}


def render(runs: Sequence[RunData]) -> str:
    """Return the page about `runs`.

    Text from the runs appears as text only: page.html escapes it, it is never a script's source,
    and the page's Content-Security-Policy allows only the scripts whose hashes it lists.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    charts, marks = drawn_charts(runs), marks_of(runs)
    data = figures.charts_json(charts, marks) | {"marks": {mark.key: mark.texts for mark in marks}}
    sources = (figures.library(), _resource("page.js"))
    scripts = [source.replace("</script", "<\\/script") for source in sources]
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=sections.cut,
    )
    environment.filters["samples"] = sections.samples
    return environment.from_string(_resource("page.html")).render(
        **sections.contents(runs),
        mark=Markup(MARK),
        policy=Markup(_policy(scripts)),
        style=Markup(_resource("page.css")),
        data=Markup(_in_json(data)),
        scripts=list(map(Markup, scripts)),
        runs=runs,
        charts=charts,
        marks=marks,
        number=sections.number,
        plain=sections.plain,
        described=described,
        max_events=MAX_EVENTS,
        num_colors=NUM_COLORS,
        dashes=DASHES,
        intervals=INTERVALS,
        trend_intervals=TREND_INTERVALS,
        version=importlib.import_module("flatout").__version__,
        now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: these scripts, inline styles, nothing from outside."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts)
    hashes = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return resources.files("flatout.measure.report").joinpath(name).read_text(encoding="utf-8")


def _in_json(document: Any) -> str:
    """Return JSON for a script element: no character in it can end the element or open another."""
    text = json.dumps(document, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
