"""The closing lines of a run: its last sample, its loss curve and its metrics."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flatout.cli.terminal.picture import curve
from flatout.display import amount, duration, gib
from flatout.measure.runlog import RunLog
from flatout.progress import counted
from flatout.storage.json_io import JsonObject
from flatout.storage.streams import columns, printable, rows, wrapped

PICTURE_COLUMNS, PICTURE_ROWS = 60, (3, 8)
BESIDE_PICTURE = 11
"""Columns of the scale, and a spare one."""
UNDER_PICTURE = 3
"""Lines of the axis, its labels, and an empty one."""
SHORT_SAMPLE = 7
"""Lines that a sample has at least: its title, its text, and an empty one."""
FACT_NAMES = 11
"""Columns of the names of the metrics."""
COMPARED_FROM_S = 10.0
"""Seconds of a run from which its rate and duration are compared with the prediction."""


def indented(text: str) -> str:
    """Return text as a block, set apart by a bar on its left."""
    return "\n".join(f"  | {line}".rstrip() for line in printable(text).strip("\n").splitlines())


def closing(
    summary: JsonObject,
    *,
    next_steps: str = "",
    encoding: str | None = None,
    width: int | None = None,
    height: int | None = None,
) -> str:
    """Return the closing lines of a run: last sample, loss curve, metrics and `next_steps`.

    `summary` is the run's summary.json. The curve and the sample come from the run directory that
    it names. The curve uses characters of `encoding` (None: that of standard output). Lines are
    wrapped to `width` (None: the terminal's), except words such as paths. If `height` (None: the
    terminal's) is small, the sample is cut and the curve is less tall, or is left out, so that
    everything fits on one screen.
    """
    width, height = width or columns(), height or rows()
    encoding = encoding or sys.stdout.encoding or "ascii"
    folder = Path(summary["run"])
    facts = wrapped(
        "\n".join(f"{name:<{FACT_NAMES}}{text}" for name, text in closing_facts(summary)), width
    )
    log = RunLog(folder)
    samples = [str(one.get("text")) for one in log.events if one["event"] == "sample"]
    sample = f"A sample:\n{wrapped(indented(samples[-1]), width)}" if samples else ""
    # the last empty line is for the shell's prompt
    room = (height or 10**9) - _num_lines(facts, next_steps)
    least, most = PICTURE_ROWS
    tall = min(room - UNDER_PICTURE - min(_num_lines(sample), SHORT_SAMPLE), most)
    losses, validation = _points(log, "train/loss", "val/loss")
    drawn = curve(
        losses if tall >= least else [],
        marks=validation,
        width=min(PICTURE_COLUMNS, max(width - BESIDE_PICTURE, 8)),
        height=tall,
        encoding=encoding,
    )
    sample = _cut(sample, room - _num_lines(drawn))
    return "\n\n".join(part for part in (sample, drawn, facts, next_steps) if part)


def _points(log: RunLog, *names: str) -> list[list[tuple[float, float]]]:
    """Return (step, metric) of the records that have both, for each metric.

    The records of a long run would not fit into memory.
    """
    points: list[list[tuple[float, float]]] = [[] for _ in names]
    for record in log.records():
        for name, found in zip(names, points, strict=True):
            if name in record:
                found.append((record["step"], record[name]))
    return points


def _num_lines(*parts: str) -> int:
    """Return the number of lines of parts, including an empty one for each."""
    return sum(part.count("\n") + 2 for part in parts if part)


def _cut(sample: str, room: int) -> str:
    """Return the first lines of a sample that fit. All of it is in events.jsonl."""
    if _num_lines(sample) <= room:
        return sample
    lines = [line for line in sample.split("\n") if line != "  |"]
    return "\n".join(lines[: max(room, SHORT_SAMPLE) - 1])


def closing_facts(summary: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for the metrics of the summary. An unknown MFU has its reason."""
    value: Callable[[str], Any] = summary.get
    yield "Run", str(summary["run"])
    has_total = value("resumed_from") and value("elapsed_s")
    total = f" ({duration(value('elapsed_s'))} in total)" if has_total else ""
    memory = f", {gib(value('peak_gib'))} peak" if value("peak_gib") else ""
    tokens = amount(summary["tokens"], "tokens")
    time = f"{duration(summary['wall_s'])}{total}"
    yield "Trained", f"{counted(summary['steps'], 'step')}, {tokens} in {time}{memory}"
    if losses := list(_losses(summary)):
        yield "Loss", ", ".join(losses)
    if value("skipped_steps"):
        skipped = counted(value("skipped_steps"), "bad step")
        yield "Skipped", f"the updates of {skipped}: see events.jsonl for each, with its reason"
    if value("alarms"):
        yield "Alarms", f"{value('alarms')}: see events.jsonl for each, with its cause"
    rates = [f"{amount(value('tokens_per_s'))} tokens/s steady"] if value("tokens_per_s") else []
    besides = "evaluation, saving and compiling" if value("compile_s") else "evaluation and saving"
    if value("wall_tokens_per_s"):
        rates.append(f"{amount(value('wall_tokens_per_s'))} tokens/s with {besides}")
    if rates:
        yield "Speed", ", ".join(rates)
    if value("mfu") is not None:
        yield "MFU", f"{value('mfu'):.1%} of the peak ({value('mfu_of')})"
    elif "mfu" in summary:
        why = str(value("mfu_of") or "no peak rate is known for this device")
        yield "MFU", why if why.startswith("unknown") else f"unknown: {why}"
    yield from _predicted(summary)


def _losses(summary: JsonObject) -> Iterator[str]:
    """Yield the losses of the summary that are known."""
    value: Callable[[str], Any] = summary.get
    if value("train_loss") is not None:
        yield f"training {value('train_loss'):.4f}"
    if value("val_loss") is not None:
        perplexity = math.exp(min(value("val_loss"), 700))
        yield f"validation {value('val_loss'):.4f} (perplexity {perplexity:.1f})"
    if value("best_val_loss") is not None and value("best_step") not in {None, summary["steps"]}:
        yield f"best in the run {value('best_val_loss'):.4f} at step {value('best_step'):,}"
    if value("bits_per_byte") is not None:
        yield f"{value('bits_per_byte'):.3f} bits per byte"


def _predicted(summary: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield what was predicted before the run, each number with the actual one."""
    forms: dict[str, Callable[[float], str]] = {
        "wall_s": duration,
        "tokens_per_s": lambda rate: f"{amount(rate)} tokens/s",
        "peak_gib": gib,
    }
    if summary.get("stopped_early"):
        del forms["wall_s"]
    if (summary.get("wall_s") or 0.0) < COMPARED_FROM_S:  # start-up is most of such a run
        forms = {"peak_gib": forms["peak_gib"]}
    predicted, found = summary.get("predicted") or {}, []
    for name, form in forms.items():
        before, after = predicted.get(name), summary.get(name)
        if before and after:
            found.append(f"{form(before)} (actual {form(after)})")
    if found:
        yield "Predicted", ", ".join(found)
