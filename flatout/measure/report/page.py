"""The page: one HTML file that needs nothing else, and runs no script but its own.

page.html lays out and escapes what this file describes as rows of plain text.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any

import numpy as np

from flatout.config.schema import flat
from flatout.display import UNKNOWN, duration
from flatout.errors import MissingPackage
from flatout.measure.diagnose.diagnosis import in_words
from flatout.measure.report.charts import NUM_COLORS, described, drawn_charts, marks_of
from flatout.measure.report.curves import INTERVALS, TREND_INTERVALS, RunData
from flatout.measure.runlog import typical
from flatout.storage.json_io import JsonObject, is_finite

MARK = "<!doctype html><!-- flatout report -->"
"""The first characters of a report, by which a file is known as one."""
MAX_EVENTS = 500
"""Events of one run in the table: the last ones."""
DASHES = {"solid": "", "dashed": "6 4", "dotted": "2 3", "dotdash": "2 3 6 3"}
Row = tuple[str, ...]
PREDICTED = {
    "score_s": ("time of an evaluation", "time"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "peak_gib": ("peak memory, GiB", ".2f"),
}
"""Predictions by their name in the summary: the label, and the form of the number."""
STEP_PARTS = {
    "step": "perf/step_ms",
    "device": "perf/device_ms",
    "host": "perf/host_ms",
    "waiting for data": "perf/data_wait_ms",
}
LONGEST_TEXT = 20_000
"""Characters of one text of a run that the page shows."""
MAX_SAMPLES = 50
"""Samples of one run in the page: the first, and the last ones."""


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


def render(runs: Sequence[RunData]) -> str:
    """Return the page about `runs`.

    Text from the runs appears as text only: page.html escapes it, it is never a script's source,
    and the page's Content-Security-Policy allows only the scripts whose hashes it lists.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from flatout.measure.report import figures

    charts, marks = drawn_charts(runs), marks_of(runs)
    data = figures.charts_json(charts, marks) | {"marks": {mark.key: mark.texts for mark in marks}}
    sources = (figures.library(), _resource("page.js"))
    scripts = [source.replace("</script", "<\\/script") for source in sources]
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=cut,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["samples"] = samples
    return environment.from_string(_resource("page.html")).render(
        **contents(runs),
        mark=Markup(MARK),
        policy=Markup(_policy(scripts)),
        style=Markup(_resource("page.css")),
        data=data,
        scripts=list(map(Markup, scripts)),
        runs=runs,
        charts=charts,
        marks=marks,
        number=number,
        plain=plain,
        in_words=in_words,
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


def contents(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return what page.html shows of the numbers and settings of runs."""
    several, every = len(runs) > 1, settings(runs)
    return {
        "notes": [f"{run.name}: {n}" if several else n for run in runs for n in run.notes],
        "results": results(runs),
        "comparability": comparability(runs),
        "differences": [row for row in every if len(set(row[1:])) > 1],
        "step_parts": list(STEP_PARTS),
        "step_times": list(step_times(runs)),
        "plan": list(plan(runs)),
        "settings": every,
    }


def cut(value: object) -> Any:
    """Return a value for the page: text without its end if it is long, HTML as it is."""
    if hasattr(value, "__html__"):
        return value
    text = str(value)
    cut_off = f"{text[:LONGEST_TEXT]}... ({len(text):,} characters)"
    return text if len(text) <= LONGEST_TEXT else cut_off


def number(value: object, form: str = "") -> str:
    """Return a number in the format `form`, by default with four digits. UNKNOWN for anything else.

    The form `time` is that of a duration. Without a form, whole numbers keep all their digits.
    """
    if not is_finite(value):
        return UNKNOWN
    if form == "time":
        return duration(value)
    if form:
        return format(value, form)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def plain(value: Any) -> str:
    """Return a value of a configuration or a finding as text."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return number(value)
    return json.dumps(value, default=str, ensure_ascii=False)


def results(runs: Sequence[RunData]) -> list[Row]:
    """Return a row for each result that some run has: its label, and that of each run."""
    columns = list(map(_results, runs))
    rows = [(label, *(column[label] for column in columns)) for label in columns[0]]
    return [row for row in rows if any(cell != UNKNOWN for cell in row[1:])]


def _results(run: RunData) -> dict[str, str]:
    """Return what a run reached. For an unfinished one, it is what its records show."""

    def reached(
        name: str, form: str, figure: str = "", reduce: Callable[[Any], Any] = lambda v: v[-1]
    ) -> str:
        known, values = number(run.summary.get(name), form), run.values(figure)
        if known == UNKNOWN and run.longest and not figure:  # tokens and elapsed_s are positions
            values = getattr(run.longest, name, values)
        return number(float(reduce(values)), form) if known == UNKNOWN and len(values) else known

    def count(*kinds: str) -> str:
        total = sum(event["event"] in kinds for event in run.events)
        return f"{total:,}" if total else UNKNOWN

    steps = number(float(run.longest.step[-1]), ",.0f") if run.longest else UNKNOWN
    total, source = run.settings.get("train.steps"), run.summary.get("mfu_of")
    if isinstance(total, int) and run.state != "finished":
        steps = f"{steps} of {total:,}"
    mfu = reached("mfu", ".1%", "perf/mfu", typical)
    if source and mfu != UNKNOWN:
        mfu += f" ({source})"
    return {
        "state": run.state,
        "steps": steps,
        "tokens": reached("tokens", ",.0f"),
        "training loss": reached("train_loss", ".4f", "train/loss"),
        "validation loss": reached("val_loss", ".4f", "val/loss"),
        "best validation loss": reached("best_val_loss", ".4f", "val/loss", np.min),
        "bits per byte": reached("bits_per_byte", ".4f"),
        "tokens/s": reached("tokens_per_s", ",.0f", "perf/tokens_per_s", typical),
        "model FLOPs utilisation": mfu,
        "peak memory, GiB": reached("peak_gib", ".2f", "mem/peak_gib", np.max),
        "time of compiling": reached("compile_s", "time"),
        "time in total": reached("elapsed_s", "time"),
        "resumed": count("resume"),
        "skipped steps": count("skip", "bad_step"),
        "recompilations": count("recompiled"),
        "alarms": count("alarm"),
    }


def step_times(runs: Sequence[RunData]) -> Iterator[Row]:
    """Yield where the time of a typical step went, for each run that knows."""
    for run in runs:
        step, *parts = (typical(run.values(figure).tolist()) for figure in STEP_PARTS.values())
        if step:
            shares = ("" if part is None else f" ms ({part / step:.0%})" for part in parts)
            cells = (number(part) + share for part, share in zip(parts, shares, strict=True))
            yield run.name, f"{number(step)} ms", *cells


def comparability(runs: Sequence[RunData]) -> list[str]:
    """Return why the losses of these runs cannot be compared directly."""
    found = []
    sizes = {plain(run.settings.get("model.vocab_size")) for run in runs} - {UNKNOWN}
    if len(sizes) > 1:
        shown = ", ".join(sorted(sizes))
        found.append(
            f"The runs have vocabularies of different sizes ({shown}): a loss per token means "
            "something different in each. Compare bits per byte."
        )
    known = [run.settings for run in runs if run.settings]
    data = {plain(each.get("data.path") or each.get("data.mix")) for each in known}
    if len(data) > 1:
        shown = ", ".join(sorted(data))
        found.append(f"The runs were trained and evaluated on different datasets ({shown}).")
    return found


def settings(runs: Sequence[RunData]) -> list[Row]:
    """Return a row for every setting of any run, of a script for every change by tune."""
    known = [run.settings or _changes(run) for run in runs]
    names = dict.fromkeys(key for each in known for key in each)
    return [(name, *(plain(each.get(name)) for each in known)) for name in names]


def _changes(run: RunData) -> JsonObject:
    """Return which speedups a script ran with, as its events list them."""
    listed = [event for event in run.events if event["event"] == "speedup"]
    return {str(event.get("name")): event.get("on") for event in listed}


def plan(runs: Sequence[RunData]) -> Iterator[Row]:
    """Yield each number that was predicted before a run beside what its summary has measured.

    A resumed run predicts the rest of its time. Early stopping is not part of a prediction, so the
    time of such a run is no measurement of it.
    """
    for run in runs:
        predicted, is_resumed = run.summary.get("predicted"), run.summary.get("resumed_from")
        time = "time since it was resumed" if is_resumed else "time in total"
        for name, value in flat(predicted).items() if isinstance(predicted, dict) else ():
            measured = run.summary.get(name)
            if name == "wall_s" and run.summary.get("stopped_early"):
                measured = None
            label, form = {"wall_s": (time, "time"), **PREDICTED}.get(name, (name, ""))
            shown, real = number(value, form), number(measured, form)
            if shown != UNKNOWN:
                ratio = f"{value / measured:.2f}" if real != UNKNOWN and measured else UNKNOWN
                yield f"{run.name}: {label}" if len(runs) > 1 else label, shown, real, ratio


def samples(run: RunData) -> list[dict[str, Any]]:
    """Return the samples that a run generated while it trained: the first, and the last ones."""
    found = [event for event in run.events if event["event"] == "sample"]
    return found if len(found) <= MAX_SAMPLES else [found[0], *found[1 - MAX_SAMPLES :]]
