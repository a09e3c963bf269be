"""A run as it goes, and what it came to."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from flatout.progress import Task
from flatout.terminal.figures import amount, columns, duration, printable, wrapped
from flatout.terminal.lines import Terminal
from flatout.terminal.picture import curve
from flatout.training.files import read_lines

PICTURE_COLUMNS = 60
BESIDE_PICTURE = 11
"""Columns of the scale, and one to spare."""
EPOCH_LINES_EVERY_S = 5.0
"""A short text is read many times a second; its epochs share a line."""


class RunReport:
    """A run as it goes: one calm line for the steps, one that stays for each evaluation, epoch, sample and save.

    Implements the observer of `training/observers.py`.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._context: AbstractContextManager[Task] | None = None
        self._task: Task | None = None
        self._step = 0
        self._last_step = -1
        self._said = ""
        self._speedups: set[str] = set()
        self._recompiled = False
        self._epoch = 0
        self._epoch_said_s = -math.inf
        self._losses: list[float] = []
        self._figures: Mapping[str, float] = {}

    def on_start(self, run: Any) -> None:
        """Open the line of the steps: the first one can take long."""
        self._step = run.step
        self._epoch = int(run.step / run.steps_per_epoch)
        self._context = self.terminal.task("Training", total=run.last_step - run.step)
        self._task = self._context.__enter__()
        self._task.note(f"{run.step:,}/{run.last_step:,}")

    def on_tick(self, step: int, last_step: int) -> None:
        """Move the line of the steps on."""
        if self._task is None:
            return
        self._task.advance(step - self._step)
        self._step, self._last_step = step, last_step
        self._task.note(" · ".join([f"{step:,}/{last_step:,}", *_step_facts(self._figures)]))

    def on_record(self, record: Mapping[str, float]) -> None:
        """Keep the newest figures for the line; an evaluation and a new epoch leave a line each."""
        self._figures = {**self._figures, **record}
        if "train/loss" in record:
            self._losses.append(record["train/loss"])
        if "val/loss" in record:
            self.terminal.say(f"Step {record['step']:,.0f}: validation loss {record['val/loss']:.4f}")
        epoch = int(record.get("train/epoch", self._epoch))
        if epoch > self._epoch and record.get("wall_s", math.inf) - self._epoch_said_s >= EPOCH_LINES_EVERY_S:
            mean = sum(self._losses) / len(self._losses) if self._losses else math.nan
            which = f"Epoch {epoch}" if epoch == self._epoch + 1 else f"Epochs {self._epoch + 1} to {epoch}"
            self.terminal.say(f"{which} done at step {record['step']:,.0f}: mean training loss {mean:.4f}")
            self._epoch, self._losses, self._epoch_said_s = epoch, [], record.get("wall_s", 0.0)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Leave a line for what happened; the last sample belongs to the closing lines."""
        if event.get("event") == "early_stop":
            self._last_step = self._step
        if event.get("event") == "sample" and self._step == self._last_step:
            return
        if event.get("event") in ("start", "resume"):
            self._speedups.clear()
        if event.get("event") == "speedup":
            if event["name"] in self._speedups:
                return  # what changed it has said so
            self._speedups.add(event["name"])
        if event.get("event") == "stop":
            self._close()
        line = _event_line(event) if event.get("event") != "recompiled" else self._recompiled_line(event)
        if line and event.get("event") == "speedup" and self.terminal.interactive:
            line = wrapped(line, self.terminal.console.width, hanging=24)
        if line and line != self._said:
            self._said = line
            self.terminal.say(line)

    def _recompiled_line(self, event: Mapping[str, Any]) -> str | None:
        """Return what to say of the first time that something was compiled again; all of them are in events.jsonl."""
        if self._recompiled:
            return None
        self._recompiled = True
        why = "; ".join(event["reasons"]) or "it had not been called before"
        return f"Compiled again at step {event['step']:,}, {event['compile_s']:.0f} s: {why}. Further times are only counted."

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Close the line of the steps."""
        self._close()

    def _close(self) -> None:
        context, self._context, self._task = self._context, None, None
        if context:
            context.__exit__(None, None, None)


def _event_line(event: Mapping[str, Any]) -> str | None:
    """Return what a person reads about an event, None for those that others say."""
    kind = event.get("event")
    if kind == "start":
        return f"Training {amount(event['parameters'], 'parameters')} on {event['device']} ({event['device_reason']}): {event['machine']}"
    if kind == "resume":
        return f"Going on from {event['from_checkpoint']}"
    if kind == "speedup":
        return f"  {'on ' if event['on'] else 'off'}  {event['name']:<16} {event['reason']}"
    if kind == "compiled" and (event["graph_breaks"] or event["cuda_graphs_skipped"]):
        pieces = f"{event['graph_breaks']} breaks, {event['cuda_graphs_skipped']} without CUDA graphs"
        return f"Compiled in pieces: {pieces}: {event['first_break'] or 'the log of the compiler says why'}"
    if kind == "save":
        return f"Saved {event['path']}"
    if kind == "sample":
        return f"Sample at step {event['step']:,}:\n{indented(event['text'])}"
    if kind == "evaluation":
        return f"Whole validation split: loss {event['loss']:.4f} on {event['tokens']:,} tokens"
    return None


def _step_facts(figures: Mapping[str, float]) -> list[str]:
    found = []
    if "train/loss" in figures:
        found.append(f"loss {figures['train/loss']:.3f}")
    if "perf/tokens_per_s" in figures:
        found.append(f"{amount(figures['perf/tokens_per_s'])} tokens/s")
    if "perf/mfu" in figures:
        found.append(f"MFU {figures['perf/mfu']:.1%}")
    return found


def indented(text: str) -> str:
    """Return text as a block that stands apart from the lines around it."""
    return "\n".join(f"  | {line}".rstrip() for line in printable(text).strip("\n").splitlines())


def closing(summary: Mapping[str, Any], *, encoding: str | None = None, width: int | None = None) -> str:
    """Return the closing lines of a run: what was measured, its loss curve and its last sample.

    `summary` is the run's summary.json; the curve and the sample come from the run folder it names.
    The curve uses characters that `encoding` (None: standard output's) has, and nothing is wider than `width` (None: the
    terminal's) but what cannot be broken, such as a path.
    """
    width = width or columns()
    encoding = encoding or sys.stdout.encoding or "ascii"
    folder = Path(summary["run"])
    events = list(read_lines(folder / "events.jsonl"))
    parts = [wrapped("\n".join(f"{name:<11}{text}" for name, text in _closing_facts(summary)), width)]
    records = [{name: value for name, value in line.items() if isinstance(value, (int, float))} for line in read_lines(folder / "metrics.jsonl")]
    points = [(r["step"], r["train/loss"]) for r in records if {"step", "train/loss"} <= r.keys()]
    marks = [(r["step"], r["val/loss"]) for r in records if {"step", "val/loss"} <= r.keys()]
    parts.append(curve(points, marks=marks, width=min(PICTURE_COLUMNS, max(width - BESIDE_PICTURE, 8)), encoding=encoding))
    samples = [str(event.get("text")) for event in events if event.get("event") == "sample"]
    if samples:
        parts.append(f"A sample:\n{indented(samples[-1])}")
    return "\n\n".join(part for part in parts if part)


def _closing_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for what the summary holds; what was not measured is left out, an unknown MFU says why."""
    value: Callable[[str], Any] = summary.get
    yield "Run", str(summary["run"])
    yield (
        "Trained",
        f"{summary['steps']:,} steps, {amount(summary['tokens'], 'tokens')}" + (f", from {value('resumed_from')}" if value("resumed_from") else ""),
    )
    losses = [f"training {value('train_loss'):.4f}"] if value("train_loss") is not None else []
    if value("val_loss") is not None:
        losses.append(f"validation {value('val_loss'):.4f} (perplexity {math.exp(min(value('val_loss'), 700)):.1f})")
    if value("best_val_loss") is not None and value("best_step") not in {None, summary["steps"]}:
        losses.append(f"best in the run {value('best_val_loss'):.4f} at step {value('best_step'):,}")
    if value("bits_per_byte") is not None:
        losses.append(f"{value('bits_per_byte'):.3f} bits a byte")
    if losses:
        yield "Loss", ", ".join(losses)
    rates = [f"{amount(value('tokens_per_s'))} tokens/s steady"] if value("tokens_per_s") else []
    besides = "evaluation, saving and compiling" if value("compile_s") else "evaluation and saving"
    rates += [f"{amount(value('wall_tokens_per_s'))} tokens/s with {besides}"] if value("wall_tokens_per_s") else []
    if rates:
        yield "Speed", ", ".join(rates)
    if value("mfu") is not None:
        yield "MFU", f"{value('mfu'):.1%} of the peak ({value('mfu_of')})"
    elif "mfu" in summary:
        why = str(value("mfu_of") or "no peak rate is known for this device")
        yield "MFU", why if why.startswith("unknown") else f"unknown: {why}"
    if value("peak_gib"):
        yield "Memory", f"{value('peak_gib'):.2f} GiB at most"
    total = f", {duration(value('elapsed_s'))} over all resumes" if value("resumed_from") and value("elapsed_s") else ""
    yield "Time", f"{duration(summary['wall_s'])}{total}"
