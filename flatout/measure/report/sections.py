"""The other sections of the page: plan against reality, findings, samples and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flatout.config.schema import flat
from flatout.measure.report.events import described
from flatout.measure.report.reading import RunData
from flatout.measure.report.values import UNKNOWN, escape, number, plain, table, time

PREDICTED: Mapping[str, tuple[str, Callable[[object], str]]] = {
    "wall_s": ("time in total", time),
    "score_s": ("time of an evaluation", time),
    "tokens_per_s": ("tokens/s", lambda value: number(value, ",.0f")),
    "peak_gib": ("peak memory, GiB", lambda value: number(value, ".2f")),
}
"""Predictions by their name in the summary: the label, and the form of the number."""
MAX_SAMPLES = 50
"""Samples of one run in the page: the first, and the last ones."""
LONGEST_SAMPLE = 20_000
MAX_EVENTS = 500
"""Events of one run in the table: the last ones."""


def plan(runs: Sequence[RunData]) -> str:
    """Return what was predicted before each run against what was measured; empty when unknown."""
    rows = [
        (f"{escape(run.name)}: {name}" if len(runs) > 1 else name, *cells)
        for run in runs
        for name, *cells in _predictions(run)
    ]
    head = ["", "predicted", "measured", "predicted / measured"]
    return table(head, rows, kind="figures") if rows else ""


def _predictions(run: RunData) -> Iterator[tuple[str, str, str, str]]:
    """Yield each predicted number beside what the summary has measured under its name.

    Early stopping is not part of a prediction, so the time of such a run is no measurement of it.
    """
    predicted = run.summary.get("predicted")
    if not isinstance(predicted, dict):
        return
    for name, value in flat(predicted).items():
        measured = run.summary.get(name)
        if name == "wall_s" and run.summary.get("stopped_early"):
            measured = None
        label, form = PREDICTED.get(name, (escape(name), number))
        shown, real = form(value), form(measured)
        if shown != UNKNOWN:
            ratio = f"{value / measured:.2f}" if real != UNKNOWN and measured else UNKNOWN
            yield label, shown, real, ratio


def findings(runs: Sequence[RunData]) -> str:
    """Return what `flatout diagnose` found; empty when it was not asked."""
    shown = []
    for run in runs:
        diagnosis = run.findings if isinstance(run.findings, Mapping) else {}
        if not diagnosis.get("verdict"):
            continue
        name = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        shown.append(f"{name}<p><strong>{escape(diagnosis['verdict'])}</strong></p>")
        shown += map(_finding, _mappings(diagnosis.get("findings")))
    return "".join(shown)


def _finding(finding: Mapping[str, Any]) -> str:
    """Return one finding: its sentence, the evidence, the line of code, and what to do."""
    figures, site = finding.get("figures"), finding.get("site")
    parts: list[tuple[str, str]] = []
    if isinstance(figures, Mapping):
        known = (f"{name} {plain(value)}" for name, value in figures.items() if value is not None)
        parts.append(("evidence", escape(", ".join(known))))
    if number(finding.get("share")) != UNKNOWN:
        parts.append(("share of the step", number(finding.get("share"), ".0%")))
    if isinstance(site, Mapping):
        place = f"{site.get('file')}:{site.get('line')}"
        parts.append(("where", f"{escape(place)} <code>{escape(site.get('text') or '')}</code>"))
    fixes = [escape(fix.get("text")) for fix in _mappings(finding.get("fixes"))]
    if fixes:
        parts.append(("what to do", "<br>".join(fixes)))
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in parts if value)
    title = escape(finding.get("verdict") or finding.get("name") or "")
    return f'<article class="finding"><h4>{title}</h4><dl>{rows}</dl></article>'


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def samples(runs: Sequence[RunData]) -> str:
    """Return the samples that the runs generated while they trained, the last one open."""
    shown = []
    for run in runs:
        found = [event for event in run.events if event.get("event") == "sample"]
        kept = found if len(found) <= MAX_SAMPLES else [found[0], *found[1 - MAX_SAMPLES :]]
        for event in kept:
            step = number(event.get("step"))
            name = f"{escape(run.name)}, step {step}" if len(runs) > 1 else f"Step {step}"
            text = escape(event.get("text", ""), longest=LONGEST_SAMPLE)
            is_last = " open" if event is kept[-1] else ""
            shown.append(f"<details{is_last}><summary>{name}</summary><pre>{text}</pre></details>")
    return "".join(shown)


def events(runs: Sequence[RunData]) -> str:
    """Return the last events of each run."""
    shown = []
    for run in runs:
        if not run.events:
            continue
        kept = run.events[-MAX_EVENTS:]
        rows = [(time(event.get("wall_s")), escape(described(event))) for event in kept]
        left_out = len(run.events) - len(kept)
        note = f"<p>{left_out:,} earlier events are in events.jsonl.</p>" if left_out else ""
        name = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        shown.append(f"{name}{note}{table(['since the start', 'event'], rows, kind='events')}")
    return "".join(shown)
