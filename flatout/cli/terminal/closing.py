"""The closing lines of a run: its last sample and its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flatout.display import Display, amount, duration, gib, loss, rate, terminal_text
from flatout.measure.runlog import RunLog
from flatout.progress import counted
from flatout.storage.json_io import JsonObject
from flatout.storage.streams import columns, printable, rows, wrapped

SHORT_SAMPLE = 6
"""Lines that a sample has at least."""
COMPARED_FROM_S = 10.0
"""Seconds of a run from which its rate and duration are compared with the prediction."""


def indented(text: str) -> str:
    """Return text as a block, set apart by a bar on its left."""
    return "\n".join(f"  | {line}".rstrip() for line in printable(text).strip("\n").splitlines())


def closing(
    summary: JsonObject,
    *,
    next_steps: str = "",
    width: int | None = None,
    height: int | None = None,
) -> str:
    """Return the closing lines of a run: last sample, metrics and `next_steps`.

    `summary` is the run's summary.json, which names the run directory with the sample. Lines are
    wrapped to `width` (None: the terminal's). If `height` (None: the terminal's) is small, the
    sample is cut, so that everything fits on one screen: all of it is in events.jsonl.
    """
    width, height = width or columns(), height or rows()
    below = [terminal_text(Display(values=[*closing_facts(summary)]), width)]
    below += [next_steps] if next_steps else []
    events = RunLog(Path(summary["run"])).events
    samples = [str(event.get("text")) for event in events if event["event"] == "sample"]
    if not samples:
        return "\n\n".join(below)
    lines = wrapped(indented(samples[-1]), width).split("\n")
    used = sum(part.count("\n") + 2 for part in below)
    if height and len(lines) + 1 > (room := max(height - used - 2, SHORT_SAMPLE)):
        lines = [line for line in lines if line != "  |"][: room - 1]
    return "\n\n".join(["\n".join(["A sample:", *lines]), *below])


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
    rates = [f"{rate(value('tokens_per_s'))} steady"] if value("tokens_per_s") else []
    besides = "evaluation, saving and compiling" if value("compile_s") else "evaluation and saving"
    if value("wall_tokens_per_s"):
        rates.append(f"{rate(value('wall_tokens_per_s'))} with {besides}")
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
        yield f"training {loss(value('train_loss'))}"
    if value("val_loss") is not None:
        perplexity = math.exp(min(value("val_loss"), 700))
        yield f"validation {loss(value('val_loss'))} (perplexity {perplexity:.1f})"
    if value("best_val_loss") is not None and value("best_step") not in {None, summary["steps"]}:
        yield f"best in the run {loss(value('best_val_loss'))} at step {value('best_step'):,}"
    if value("bits_per_byte") is not None:
        yield f"{value('bits_per_byte'):.3f} bits per byte"


def _predicted(summary: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield what was predicted before the run, each number with the actual one."""
    forms: dict[str, Callable[[float], str]] = {
        "wall_s": duration,
        "tokens_per_s": rate,
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
