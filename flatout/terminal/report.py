"""The progress of a run, and its closing summary."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from flatout.figures import amount, duration, gib
from flatout.json_io import JsonObject
from flatout.measure.runlog import RunLog
from flatout.progress import counted
from flatout.streams import printable
from flatout.terminal.epochs import Epochs
from flatout.terminal.lines import OpenTask, Terminal
from flatout.terminal.mirror import mirror_line
from flatout.terminal.pace import Pace
from flatout.terminal.panel import Panel
from flatout.terminal.picture import curve
from flatout.terminal.screen import columns, rows, wrapped

PICTURE_COLUMNS, PICTURE_ROWS = 60, (3, 8)
BESIDE_PICTURE = 11
"""Columns of the scale, and a spare one."""
UNDER_PICTURE = 3
"""Lines of the axis, its labels, and an empty one."""
SHORT_SAMPLE, SHORTEST_SAMPLE = 4, 3
"""Lines reserved for a sample, and the minimum: its title, its text, and an empty one."""
CELL_ENCODING = "utf-8"
"""Of a notebook's cell."""
FACT_NAMES = 11
"""Columns of the names of the figures."""
COMPARED_FROM_S = 10.0
"""Seconds of a run from which its rate and duration are compared with the prediction."""


class RunReport:
    """Shows a run: a line for its steps, and permanent ones for evaluations, samples and saves.

    With `verbose`, each speedup also has a line, on or off, with the reason. Implements
    `training/metrics/observers.Observer`.
    """

    def __init__(self, terminal: Terminal, *, verbose: bool = False) -> None:
        self.terminal = terminal
        self._verbose = verbose
        self._context: AbstractContextManager[OpenTask] | None = None
        self._task: OpenTask | None = None
        self._step = 0
        self._last_step = -1
        self._last_line = ""
        self._decisions: list[JsonObject] = []
        self._recompiled = False
        self._epochs: Epochs | None = None
        self._requested_epochs: float | None = None
        self._panel = self._new_panel()
        self._figures: Mapping[str, float] = {}
        self._pace = Pace(0, terminal.clock)

    def on_start(self, run: Any) -> None:
        """Print how many speedups are on, and show the line of the steps before the first one."""
        width = self.terminal.console.width if self.terminal.interactive else None
        shown = _every_speedup(self._decisions, width)
        for line in shown if self._verbose else _count_of_speedups(self._decisions):
            self.terminal.say(line)
        self._decisions = []
        self._step, self._last_step = run.step, -1
        self._epochs = Epochs(
            run.step / run.steps_per_epoch, total=self._requested_epochs, last_step=run.last_step
        )
        self._panel = self._new_panel()
        self._pace = Pace(run.tokens_per_step, self.terminal.clock)
        self._context = self.terminal.task("Training", total=run.last_step, done=run.step)
        self._task = self._context.__enter__()
        self._task.note(f"{run.step:,}/{run.last_step:,}")
        self._task.below = self._panel.lines

    def on_tick(self, step: int, last_step: int) -> None:
        """Update the line of the steps."""
        if self._task is None:
            return
        self._task.advance(step - self._step)
        self._step, self._last_step = step, last_step
        self._pace.tick(step)
        where, rates, left = f"{step:,}/{last_step:,}", self._rates(), self._time_left()
        self._panel.rates(rates)
        self._task.headline = " · ".join([where, *left])
        self._task.note(" · ".join([where, *self._loss(), *rates, *left]))

    def on_record(self, record: Mapping[str, float]) -> None:
        """Keep the latest figures for the line; print evaluations and new epochs."""
        self._figures = {**self._figures, **record}
        self._pace.record(record)
        self._panel.record(record)
        if "val/loss" in record:
            self.terminal.say(
                f"Step {record['step']:,.0f}: validation loss {record['val/loss']:.4f}"
            )
        line = self._epochs.line(record) if self._epochs else None
        if line:
            self.terminal.say(line)

    def on_event(self, event: JsonObject) -> None:
        """Print a line about an event; the last sample is part of the closing lines."""
        kind = event.get("event")
        if kind == "early_stop":
            self._last_step = self._step
        if kind == "sample" and self._step == self._last_step:
            return
        if kind in ("start", "resume"):
            self._decisions = []
            self._requested_epochs = event.get("epochs")
        self._panel.event(event)
        if kind == "speedup":
            if self._task is None:  # later changes have their own messages
                self._decisions.append(event)
            return
        if kind == "stop":
            self._close()
        line = self._recompiled_line(event) if kind == "recompiled" else _event_line(event)
        if line and line != self._last_line:
            self._last_line = line
            self.terminal.say(line)

    def _new_panel(self) -> Panel:
        encoding = CELL_ENCODING if self.terminal.is_cell else self.terminal.console.encoding
        return Panel(self.terminal.clock, encoding=encoding)

    def _loss(self) -> list[str]:
        return [f"loss {self._figures['train/loss']:.3f}"] if "train/loss" in self._figures else []

    def _rates(self) -> list[str]:
        rates = self._pace.rates()
        if rates is None:
            return []
        found = [f"{amount(rates.tokens_per_s)} tokens/s"]
        if self._pace.is_steady and "perf/mfu" in self._figures:
            found.append(f"MFU {self._figures['perf/mfu']:.1%}")
        return found

    def _time_left(self) -> list[str]:
        rates = self._pace.rates()
        if rates is None or self._step >= self._last_step:
            return []
        return [f"{duration((self._last_step - self._step) / rates.steps_per_s)} left"]

    def _recompiled_line(self, event: JsonObject) -> str | None:
        """Return a line about the first recompilation, None for others; all are in events.jsonl."""
        if self._recompiled:
            return None
        self._recompiled = True
        why = "; ".join(event["reasons"]) or "first call"
        return (
            f"Recompiled at step {event['step']:,}, {event['compile_s']:.0f} s: {why}. "
            "Further recompilations are only counted."
        )

    def on_end(self, summary: JsonObject) -> None:
        """Close the line of the steps; in a notebook, print the result."""
        self._close()
        if self.terminal.is_cell:
            for name, text in _closing_facts(summary):
                if name in ("Trained", "Loss"):
                    self.terminal.say(f"{name}: {text}")

    def _close(self) -> None:
        context, self._context, self._task = self._context, None, None
        if context:
            context.__exit__(None, None, None)


def _event_line(event: JsonObject) -> str | None:
    """Return a line about an event, None if it needs none."""
    kind = event.get("event")
    if kind == "start":
        size = amount(event["parameters"], "parameters")
        device = f"{event['device']} ({event['device_reason']})"
        return f"Training {size} on {device}: {event['machine']}"
    if kind == "resume":
        steps = f"step {event['step']:,} of {event['last_step']:,}"
        return f"Resuming at {steps} from {event['from_checkpoint']}"
    if kind == "compiled" and (event["graph_breaks"] or event["cuda_graphs_skipped"]):
        pieces = (
            f"{event['graph_breaks']} breaks, {event['cuda_graphs_skipped']} without CUDA graphs"
        )
        why = event["first_break"] or "the compiler's log says why"
        return f"Compiled in pieces: {pieces}: {why}"
    if kind == "save":
        return f"Saved {event['path']}"
    if kind == "sample":
        return f"Sample at step {event['step']:,}:\n{indented(event['text'])}"
    if kind == "evaluation":
        return f"Whole validation split: loss {event['loss']:.4f} on {event['tokens']:,} tokens"
    if kind == "alarm":
        return f"Alarm: {event['text']}"
    if kind == "alarm_over":
        return str(event["text"])
    if "logger" in event:
        return _logger_line(event)
    return mirror_line(event)


def _logger_line(event: JsonObject) -> str:
    """Return a line about what a logger says, or about its failure."""
    if event["event"] == "logger":
        return f"{event['logger']}: {event['text']}"
    if event["event"] == "no_tensorboard":
        return (
            f"TensorBoard's event file can no longer be written ({event['reason']}); "
            "metrics.jsonl has the same figures."
        )
    return (
        f"The logger {event['logger']} has failed and is left out ({event['reason']}). Training "
        "continues; metrics.jsonl has the same figures."
    )


def _count_of_speedups(decisions: Sequence[JsonObject]) -> Iterator[str]:
    if decisions:
        on = sum(decision["on"] for decision in decisions)
        yield (
            f"{on} of {len(decisions)} speedups on; `flatout list speedups` or --verbose shows each"
        )


def _every_speedup(decisions: Sequence[JsonObject], width: int | None) -> Iterator[str]:
    """Yield each speedup with its reason, in columns, wrapped to `width`."""
    names = max((len(decision["name"]) for decision in decisions), default=0)
    for decision in decisions:
        start = f"  {'on ' if decision['on'] else 'off'}  {decision['name']:<{names}}  "
        yield wrapped(start + decision["reason"], width or sys.maxsize, hanging=len(start))


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
    """Return the closing lines of a run: last sample, `next_steps`, loss curve and figures.

    `summary` is the run's summary.json; the curve and the sample come from the run directory that
    it names. The curve uses characters of `encoding` (None: that of standard output). Lines are
    wrapped to `width` (None: the terminal's), except words such as paths. If `height` (None: the
    terminal's) is small, the curve is less tall and the sample is cut, so that everything fits on
    one screen.
    """
    width, height = width or columns(), height or rows()
    encoding = encoding or sys.stdout.encoding or "ascii"
    folder = Path(summary["run"])
    facts = wrapped(
        "\n".join(f"{name:<{FACT_NAMES}}{text}" for name, text in _closing_facts(summary)), width
    )
    log = RunLog(folder)
    samples = [str(one.get("text")) for one in log.events() if one["event"] == "sample"]
    sample = f"A sample:\n{wrapped(indented(samples[-1]), width)}" if samples else ""
    # the last empty line is for the shell's prompt
    room = math.inf if height is None else height - _num_lines(facts, next_steps)
    least, most = PICTURE_ROWS
    tall = int(min(max(room - UNDER_PICTURE - (SHORT_SAMPLE if sample else 0), least), most))
    losses, validation = _points(log, "train/loss", "val/loss")
    drawn = curve(
        losses,
        marks=validation,
        width=min(PICTURE_COLUMNS, max(width - BESIDE_PICTURE, 8)),
        height=tall,
        encoding=encoding,
    )
    sample = _cut(sample, room - _num_lines(drawn))
    return "\n\n".join(part for part in (sample, next_steps, drawn, facts) if part)


def _points(log: RunLog, *names: str) -> list[list[tuple[float, float]]]:
    """Return (step, figure) of the records that have both, for each figure.

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


def _cut(sample: str, room: float) -> str:
    """Return the first lines of a sample that fit; events.jsonl has all of it."""
    if _num_lines(sample) <= room:
        return sample
    lines = [line for line in sample.split("\n") if line != "  |"]
    return "\n".join(lines[: max(int(room), SHORTEST_SAMPLE) - 1])


def _closing_facts(summary: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for the figures of the summary; an unknown MFU has its reason."""
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
    """Yield what was predicted before the run, and how far it was from what was measured."""
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
            miss = before / after - 1
            found.append(f"{form(before)} ({abs(miss):.0%} too {'high' if miss > 0 else 'low'})")
    if found:
        yield "Predicted", ", ".join(found)
