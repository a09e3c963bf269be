"""The other sections of the page: plan against reality, findings, samples and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.measure.report.events import described
from flatout.measure.report.reading import RunData
from flatout.measure.report.values import UNKNOWN, escape, number, plain, table, time

MAX_SAMPLES = 50
"""Samples of one run in the page: the first, and the last ones."""
LONGEST_SAMPLE = 20_000
MAX_EVENTS = 500
"""Events of one run in the table: the last ones."""


def plan(runs: Sequence[RunData]) -> str:
    """Return what was predicted before each run against what was measured; empty when unknown."""
    rows = [
        (f"{escape(run.name)}: {escape(name)}" if len(runs) > 1 else escape(name), *cells)
        for run in runs
        for name, *cells in _predictions(run)
    ]
    return table(["", "predicted", "measured", "measured / predicted"], rows) if rows else ""


def _predictions(run: RunData) -> list[tuple[str, str, str, str]]:
    """Return a row for each predicted number that the summary has measured under its name."""
    predicted = run.summary.get("predicted")
    if not isinstance(predicted, Mapping):
        return []
    found = []
    for name, value in predicted.items():
        measured = run.summary.get(str(name))
        shown, real = number(value), number(measured)
        if shown != UNKNOWN:
            known = real != UNKNOWN and value
            ratio = number(measured / value, ".2f") if known else UNKNOWN
            found.append((str(name), shown, real, ratio))
    return found


def findings(runs: Sequence[RunData]) -> str:
    """Return the findings that `flatout diagnose` wrote; empty when there are none."""
    shown = []
    for run in runs:
        found = run.findings
        verdict = found.get("verdict") if isinstance(found, Mapping) else None
        listed = found.get("findings") if isinstance(found, Mapping) else found
        if not isinstance(listed, list):
            listed = []
        if not listed and verdict is None:
            continue
        shown.append(f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "")
        shown.append(f"<p><strong>{escape(plain(verdict))}</strong></p>" if verdict else "")
        shown += [_finding(one) for one in listed if isinstance(one, Mapping)]
    return "".join(shown)


def _finding(finding: Mapping[str, Any]) -> str:
    """Return one finding: its sentence, then every other field that has a value."""
    title = finding.get("verdict") or finding.get("name") or "finding"
    rest = "".join(
        f"<dt>{escape(name)}</dt><dd>{_nested(value)}</dd>"
        for name, value in finding.items()
        if value not in (None, "", [], {}) and value != title
    )
    return f'<article class="finding"><h4>{escape(plain(title))}</h4><dl>{rest}</dl></article>'


def _nested(value: Any, depth: int = 0) -> str:
    """Return a value of a finding: lists as lists, mappings as name: value."""
    if depth < 3 and isinstance(value, Mapping):
        pairs = (
            f"<li>{escape(name)}: {_nested(one, depth + 1)}</li>"
            for name, one in value.items()
            if one is not None
        )
        return f"<ul>{''.join(pairs)}</ul>"
    if depth < 3 and isinstance(value, list):
        return f"<ul>{''.join(f'<li>{_nested(one, depth + 1)}</li>' for one in value)}</ul>"
    return escape(plain(value))


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
