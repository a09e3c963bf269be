"""The page: one HTML file that needs nothing else, and runs no script but its own.

page.html lays out the sections that this file makes, whose text is escaped.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.display import UNKNOWN, Column, Display, Table, digits, duration, html, plain
from flatout.errors import MissingPackage
from flatout.measure.report.curves import CHARTS, INTERVALS, RunData
from flatout.storage.json_io import is_finite
from flatout.storage.streams import shortened

MARK = "<!doctype html><!-- flatout report -->"
"""The first characters of a report, by which a file is known as one."""
MAX_EVENTS = 500
"""Events of one run in the page: the last ones."""
LONGEST_TEXT = 20_000
"""Characters of one text of a run that the page shows."""
HIDDEN = {"event", "time", "step", "wall_s", "environment"}
"""Fields of an event that are not among its details."""
SUMMARY = {
    "val_loss": "validation loss of the whole split",
    "best_val_loss": "best validation loss",
    "bits_per_byte": "bits per byte",
    "mfu_of": "peak rate",
    "compile_s": "seconds of compiling",
}
"""What a finished run has besides its records."""
NO_SETTINGS = "These directories have no config.yaml, so their settings are not known."


def require_packages() -> None:
    """Check that the packages of a report are installed, without importing them.

    Raises: MissingPackage with the install line.
    """
    for package in ("bokeh", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(
                f"A report needs the package {package}, which is not installed.",
                fix='Install it: `pip install "flatout[report]"`.',
            )


@dataclass(frozen=True)
class PageSection:
    """A part of the page. The charts follow the results."""

    key: str
    title: str
    body: str
    """A fragment of HTML in which all text of runs is escaped."""


def render(runs: Sequence[RunData]) -> str:
    """Return the page about `runs`.

    Text from the runs appears as text only: it is escaped, it is never a script's source, and the
    page's Content-Security-Policy allows only the scripts whose hashes it lists.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from flatout.measure.report import charts

    drawn = charts.drawn_charts(runs)
    text = {
        suffix: Path(__file__).with_suffix(suffix).read_text(encoding="utf-8")
        for suffix in (".html", ".css", ".js")
    }
    scripts = [one.replace("</script", "<\\/script") for one in (charts.library(), text[".js"])]
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()) for one in scripts)
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.from_string(text[".html"]).render(
        mark=Markup(MARK),
        hashes=Markup(" ".join(f"'sha256-{digest.decode()}'" for digest in digests)),
        style=Markup(text[".css"]),
        data=charts.charts_json(drawn),
        scripts=list(map(Markup, scripts)),
        runs=runs,
        sections=list(sections(runs)),
        charts=drawn,
        left_out=shortened(charts.others_in(runs)[charts.MAX_OTHER_CHARTS :]),
        num_colors=charts.NUM_COLORS,
        dashes=charts.DASHES,
        intervals=INTERVALS,
        version=importlib.import_module("flatout").__version__,
        now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def sections(runs: Sequence[RunData]) -> Iterator[PageSection]:
    """Yield the sections: differences, results, findings, events, settings."""
    several, every = len(runs) > 1, [settings(run) for run in runs]
    columns = [Column(""), *(Column(run.name) for run in runs)]

    def table(found: Sequence[Mapping[str, str]], notes: Sequence[str], *, all_rows: bool) -> str:
        """Return a table with a column for each run as HTML, of all rows or those that differ."""
        names = dict.fromkeys(name for one in found for name in one)
        rows = [(name, *(one.get(name, UNKNOWN) for one in found)) for name in names]
        kept = [row for row in rows if all_rows or len({*row[1:]}) > 1]
        tables = [Table(columns, kept)] if kept else []
        return html(Display(tables=tables, notes=notes))

    if several:
        notes = comparability(every) if any(every) else [NO_SETTINGS]
        yield PageSection("differences", "Differences", table(every, notes, all_rows=False))
    notes = [f"{run.name}: {note}" if several else note for run in runs for note in run.notes]
    reached = [results(run) for run in runs]
    body = (
        table(reached, notes, all_rows=True)
        if several
        else html(Display(values=[*reached[0].items()], notes=notes))
    )
    yield PageSection("results", "Results", body)
    for run in runs:
        of_run = f" of {run.name}" if several else ""
        if run.diagnosis:
            shown = [one.display() for one in run.diagnosis.findings]
            shown = shown or [Display(run.diagnosis.verdict)]
            body = "".join(f"<article>{html(one)}</article>" for one in shown)
            yield PageSection("findings", f"Findings{of_run}", body)
        rows = [
            (
                duration(event["wall_s"]) if is_finite(event.get("wall_s")) else UNKNOWN,
                plain(event.get("step")),
                str(event["event"]),
                cut(plain({name: value for name, value in event.items() if name not in HIDDEN})),
            )
            for event in run.events
            if event["event"] != "speedup" or event.get("step")  # the settings have the first
        ]
        if rows:
            earlier = len(rows) - MAX_EVENTS
            notes = [f"{earlier:,} earlier events are in events.jsonl."] if earlier > 0 else []
            head = [*map(Column, ("since its process started", "step", "event", "details"))]
            body = html(Display(tables=[Table(head, rows[-MAX_EVENTS:])], notes=notes))
            yield PageSection("events", f"Events{of_run}", body)
    notes = [] if any(every) else [NO_SETTINGS]
    yield PageSection("settings", "Settings", table(every, notes, all_rows=True))


def cut(text: str) -> str:
    """Return a text without its end if it is long."""
    cut_off = f"{text[:LONGEST_TEXT]}... ({len(text):,} characters)"
    return text if len(text) <= LONGEST_TEXT else cut_off


def results(run: RunData) -> dict[str, str]:
    """Return what a run has reached, by its records and its summary."""
    total = run.settings.get("train.steps")
    of_total = f" of {total:,}" if isinstance(total, int) and run.state != "finished" else ""
    found = {"state": run.state, "steps": f"{run.steps:,.0f}{of_total}"}
    if is_finite(run.elapsed_s):
        found["time"] = duration(run.elapsed_s)
    for chart in CHARTS:
        for metric, label in chart.labels.items():
            if values := run.values(metric):
                value = chart.scale * (chart.reduce(values) or 0.0)
                name = f"{chart.title}, {label}" if label else chart.title
                found[name] = f"{digits(value)} {chart.unit}"
    for name, label in SUMMARY.items():
        known = (run.summary or {}).get(name)
        if known is not None:
            found[label] = cut(plain(known))
    if counted := Counter(str(event["event"]) for event in run.events):
        found["events"] = ", ".join(f"{number:,} {kind}" for kind, number in counted.items())
    return found


def comparability(every: Sequence[Mapping[str, str]]) -> list[str]:
    """Return why the losses of runs with these settings cannot be compared."""
    found = [] if any(one != every[0] for one in every) else ["The settings are the same."]
    reasons = {
        "model.vocab_size": "a loss per token means something else in each. Compare bits per byte.",
        "data.path": "the runs were trained and evaluated on different datasets.",
        "data.mix": "the runs were trained and evaluated on different datasets.",
    }
    for key, why in reasons.items():
        values = {one.get(key, UNKNOWN) for one in every if one}
        if len(values) > 1:
            found.append(f"{key} differs ({', '.join(sorted(values))}): {why}")
    return found


def settings(run: RunData) -> dict[str, str]:
    """Return the settings of a run, with all digits of their numbers."""
    exact = json.loads(json.dumps(run.settings), parse_float=str)
    return {name: cut(plain(value)) for name, value in exact.items()}
