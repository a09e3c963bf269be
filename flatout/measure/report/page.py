"""The page: one HTML file that needs nothing else, and runs no script but its own.

page.html lays out the sections that this file makes, whose text is escaped.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from flatout.display import (
    UNKNOWN,
    Column,
    Display,
    Table,
    digits,
    duration,
    gib,
    html,
    loss,
    plain,
)
from flatout.errors import MissingPackage
from flatout.measure.report.curves import INTERVALS, RunData
from flatout.measure.runlog import typical
from flatout.storage.json_io import is_finite

MARK = "<!doctype html><!-- flatout report -->"
"""The first characters of a report, by which a file is known as one."""
MAX_EVENTS, MAX_SAMPLES = 500, 50
"""Events and samples of one run in the page: the last ones."""
LONGEST_TEXT = 20_000
"""Characters of one text of a run that the page shows."""
HIDDEN = {"event", "time", "step", "wall_s", "environment"}
"""Fields of an event that are not among its details."""
Row = tuple[str, ...]


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _whole(value: float) -> str:
    return f"{value:,.0f}"


RESULTS: tuple[tuple[str, str, str, Callable[[Any], Any], Callable[[float], str]], ...] = (
    ("tokens", "tokens", "tokens", _last, _whole),
    ("training loss", "train_loss", "train/loss", _last, loss),
    ("validation loss", "val_loss", "val/loss", _last, loss),
    ("best validation loss", "best_val_loss", "val/loss", min, loss),
    ("bits per byte", "bits_per_byte", "", _last, loss),
    ("tokens/s", "tokens_per_s", "perf/tokens_per_s", typical, _whole),
    ("model FLOPs utilisation", "mfu", "perf/mfu", typical, "{:.1%}".format),
    ("peak memory", "peak_gib", "mem/peak_gib", max, gib),
    ("time of compiling", "compile_s", "", _last, duration),
    ("time in total", "elapsed_s", "elapsed_s", _last, duration),
)
"""Label, name in the summary; and of a run without one the metric, how it is reduced; its form."""
STEP_PARTS = {
    "median step": "step",
    "of it on the device": "device",
    "of it on the host": "host",
    "of it waiting for data": "data_wait",
}
"""Labels of the times of a step, in the records after the first one."""
COUNTED = {
    "resumed": ("resume",),
    "skipped steps": ("skip", "bad_step"),
    "recompilations": ("recompiled",),
    "alarms": ("alarm",),
}
"""Numbers of events."""


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
    """A part of the page."""

    key: str
    title: str
    body: str
    """A fragment of HTML in which all text of runs is escaped."""
    is_folded: bool = False


def render(runs: Sequence[RunData]) -> str:
    """Return the page about `runs`.

    Text from the runs appears as text only: it is escaped, it is never a script's source, and the
    page's Content-Security-Policy allows only the scripts whose hashes it lists.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from flatout.measure.report import charts

    drawn = charts.drawn_charts(runs)
    sources = (charts.library(), _resource("page.js"))
    scripts = [source.replace("</script", "<\\/script") for source in sources]
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.from_string(_resource("page.html")).render(
        mark=Markup(MARK),
        policy=Markup(_policy(scripts)),
        style=Markup(_resource("page.css")),
        data=charts.charts_json(drawn),
        scripts=list(map(Markup, scripts)),
        runs=runs,
        above=list(above(runs)),
        charts=drawn,
        below=list(below(runs)),
        num_colors=charts.NUM_COLORS,
        dashes=charts.DASHES,
        intervals=INTERVALS,
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


def above(runs: Sequence[RunData]) -> Iterator[PageSection]:
    """Yield the sections above the charts: changes, differences, results."""
    several = len(runs) > 1
    for run in runs:
        if run.changes:
            yield PageSection("changes", "Changes", f"<pre>{escape(cut(run.changes))}</pre>")
    if several:
        different = [row for row in settings(runs) if len(set(row[1:])) > 1]
        known = [run for run in runs if run.settings]
        nothing = "The settings of these runs are the same." if known else NO_SETTINGS
        tables = [_by_run(runs, different)] if different else []
        notes = [*comparability(runs), *([] if different else [nothing])]
        yield PageSection("differences", "Differences", html(Display(tables=tables, notes=notes)))
    reached = results(runs)
    shown = Display(
        values=[] if several else [(label, cell) for label, cell, *_ in reached],
        tables=[_by_run(runs, reached)] if several else [],
        notes=[f"{run.name}: {note}" if several else note for run in runs for note in run.notes],
    )
    yield PageSection("results", "Results", html(shown))


def below(runs: Sequence[RunData]) -> Iterator[PageSection]:
    """Yield the sections below the charts: times, findings, samples, events, settings."""
    several = len(runs) > 1
    diagnoses = [
        html(Display(f"{run.name}: {run.diagnosis.verdict}" if several else run.diagnosis.verdict))
        + "".join(f"<article>{html(one.display())}</article>" for one in run.diagnosis.findings)
        for run in runs
        if run.diagnosis
    ]
    if diagnoses:
        yield PageSection("findings", "Findings", "".join(diagnoses))
    for run in runs:
        of_run = f" of {run.name}" if several else ""
        samples = [event for event in run.events if event["event"] == "sample"]
        if samples:
            body = "".join(
                f"<details{' open' * (event is samples[-1])}><summary>Step "
                f"{escape(plain(event.get('step')))}</summary>"
                f"<pre>{escape(cut(str(event.get('text', ''))))}</pre></details>"
                for event in samples[-MAX_SAMPLES:]
            )
            yield PageSection("samples", f"Samples{of_run}", body)
        events = [event for event in run.events if event["event"] != "sample"]
        if events:
            rows = [
                (
                    known(event.get("wall_s"), duration),
                    plain(event.get("step")),
                    str(event["event"]),
                    cut(plain({name: each for name, each in event.items() if name not in HIDDEN})),
                )
                for event in events[-MAX_EVENTS:]
            ]
            earlier = len(events) - len(rows)
            notes = [f"{earlier:,} earlier events are in events.jsonl."] if earlier else []
            columns = [Column(label) for label in ("since the start", "step", "event", "details")]
            table = Table(columns, rows)
            body = html(Display(tables=[table], notes=notes))
            yield PageSection("events", f"Events{of_run}", body, is_folded=True)
    every = settings(runs)
    shown = Display(tables=[_by_run(runs, every)]) if every else Display(NO_SETTINGS)
    yield PageSection("settings", "Settings", html(shown), is_folded=True)


NO_SETTINGS = "These directories have no config.yaml, so their settings are not known."


def _by_run(runs: Sequence[RunData], rows: Sequence[Row]) -> Table:
    return Table([Column(""), *(Column(run.name) for run in runs)], rows)


def cut(text: str) -> str:
    """Return a text without its end if it is long."""
    cut_off = f"{text[:LONGEST_TEXT]}... ({len(text):,} characters)"
    return text if len(text) <= LONGEST_TEXT else cut_off


def known(value: object, form: Callable[[float], str]) -> str:
    """Return a number in a form. UNKNOWN for anything else."""
    return form(value) if is_finite(value) else UNKNOWN


def setting(value: object) -> str:
    """Return a value of a configuration as text."""
    if value is None or isinstance(value, float):
        return known(value, digits)
    return cut(value if isinstance(value, str) else json.dumps(value, default=str))


def results(runs: Sequence[RunData]) -> list[Row]:
    """Return a row for each result that some run has: its label, and that of each run."""
    columns = list(map(_results, runs))
    rows = [(label, *(column[label] for column in columns)) for label in columns[0]]
    return [row for row in rows if any(cell != UNKNOWN for cell in row[1:])]


def _results(run: RunData) -> dict[str, str]:
    """Return what a run reached. For an unfinished one, it is what its records show."""
    total, last = run.settings.get("train.steps"), max(run.values("step"), default=None)
    of_total = f" of {total:,}" if isinstance(total, int) and run.state != "finished" else ""
    found = {"state": run.state, "steps": f"{known(last, _whole)}{of_total}"}
    for label, name, metric, reduce, form in RESULTS:
        value, values = run.summary.get(name), run.values(metric)
        if not is_finite(value) and values:
            value = reduce(values)
        found[label] = known(value, form)
        if name == "mfu" and run.summary.get("mfu_of") and found[label] != UNKNOWN:
            found[label] += f" ({run.summary['mfu_of']})"
    step_ms = typical(run.values("perf/step_ms"))
    for label, name in STEP_PARTS.items():
        part_ms = typical(run.values(f"perf/{name}_ms"))
        found[label] = known(part_ms, "{:.4g} ms".format)
        if part_ms is not None and step_ms and name != "step":
            found[label] += f" ({part_ms / step_ms:.0%})"
    for label, kinds in COUNTED.items():
        count = sum(event["event"] in kinds for event in run.events)
        found[label] = f"{count:,}" if count else UNKNOWN
    return found


def comparability(runs: Sequence[RunData]) -> list[str]:
    """Return why the losses of these runs cannot be compared directly."""
    every = [run.settings for run in runs if run.settings]
    sizes = {setting(each.get("model.vocab_size")) for each in every} - {UNKNOWN}
    data = {setting(each.get("data.path") or each.get("data.mix")) for each in every}
    found = []
    if len(sizes) > 1:
        found.append(
            f"The runs have vocabularies of different sizes ({', '.join(sorted(sizes))}): a loss "
            "per token means something different in each. Compare bits per byte."
        )
    if len(data) > 1:
        shown = ", ".join(sorted(data))
        found.append(f"The runs were trained and evaluated on different datasets ({shown}).")
    return found


def settings(runs: Sequence[RunData]) -> list[Row]:
    """Return a row for every setting of any run, of a script for every change by tune."""
    every = [
        run.settings
        or {str(e.get("name")): e.get("on") for e in run.events if e["event"] == "speedup"}
        for run in runs
    ]
    names = dict.fromkeys(key for each in every for key in each)
    return [(name, *(setting(each.get(name)) for each in every)) for name in names]
