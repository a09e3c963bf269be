"""Shows a run while it trains: a line for its steps, a panel below it, and lines that stay."""

from __future__ import annotations

import functools
import inspect
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.assembly.choices import speedups_for
from flatout.cli.terminal.lines import OpenTask, Terminal
from flatout.display import amount, quoted, rate
from flatout.progress import counted
from flatout.storage.json_io import JsonObject
from flatout.storage.streams import can_show, wrapped

MIN_COLUMNS, MIN_LINES = 40, 12
"""A smaller terminal has no panel."""
BARS, MAX_BARS = "▁▂▃▄▅▆▇█", 20
"""Of the sparkline."""
MAX_LOSSES = 2000
"""The sparkline shows this many of the latest losses."""
LINE: dict[str, Callable[[float], str]] = {
    "train/epoch": "epoch {:.2f}".format,
    "train/loss": "loss {:.3f}".format,
    "perf/tokens_per_s": rate,
    "perf/samples_per_s": lambda number: f"{amount(number)} samples/s",
}
"""Metrics of the line of the steps."""
DEVICE = {
    "perf/mfu": "MFU {:.1%}",
    "mem/allocated_gib": "{:.2f} GiB",
    "mem/peak_gib": "{:.2f} GiB peak",
    "mem/reserved_gib": "{:.2f} GiB held",
    "gpu/util_pct": "GPU {:.0f}%",
    "gpu/power_w": "{:.0f} W",
}
"""Metrics of the panel's line about the device. Those that a run lacks have no place on it."""


def settings_of(run: Any) -> str:
    """Return the precision, the optimizer and the batch of a run."""
    config, batch = run.config, run.config.batch
    optimizer = next(iter(speedups_for("optimizer", run.speedups)), "adamw").replace("-", " ")
    parts = [
        f"{run.arithmetic} matmuls",
        "compiled" if speedups_for("compilation", run.speedups) else "eager",
        optimizer if config.optim.kind == "adamw" else config.optim.kind,
        *speedups_for("activations", run.speedups),
    ]
    sizes = {"micro-batches": batch.accumulate or 1, "devices": run.mesh.dp_size}
    product = "".join(f" x {size:,} {name}" for name, size in sizes.items() if size > 1)
    rows = f"{counted(int(batch.rows_per_device), 'row')}{product} of {config.data.seq_len:,}"
    size = (
        f"{run.tokens_per_step // config.data.seq_len:,} documents per step"
        if batch.by_tokens
        else f"{rows} tokens = {run.tokens_per_step:,} per step"
    )
    return f"{', '.join(parts)}; {size}"


def sparkline(values: Sequence[float], encoding: str) -> str:
    """Return values as one line of bars, each the mean of its share. "" if they cannot be shown."""
    count = min(MAX_BARS, len(values))
    if count < 2 or not can_show(BARS, encoding):
        return ""
    edges = [len(values) * number // count for number in range(count + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


class RunReport:
    """Shows a run: a line for its steps, and permanent ones for evaluations, samples and saves.

    With `verbose`, each speedup also has a line, on or off, with the reason. Implements
    `training/metrics/observers.Observer`.
    """

    def __init__(self, terminal: Terminal, *, verbose: bool = False) -> None:
        self.terminal = terminal
        self._verbose = verbose
        self._open = ExitStack()
        self._task: OpenTask | None = None
        self._said: set[str] = set()
        """Lines about events, and kinds of events that have only one."""
        self._decisions: list[JsonObject] = []
        self._step, self._last_step = 0, -1
        self._metrics: Mapping[str, float] = {}
        self._losses = deque[float](maxlen=MAX_LOSSES)

    def on_start(self, run: Any) -> None:
        """Print how many speedups are on, and show the line of the steps before the first one."""
        width = self.terminal.console.width if self.terminal.interactive else sys.maxsize
        decisions, self._decisions = self._decisions, []
        names = max((len(one["name"]) for one in decisions), default=0)
        for one in decisions if self._verbose else ():
            start = f"  {'on ' if one['on'] else 'off'}  {one['name']:<{names}}  "
            self.terminal.say(wrapped(start + one["reason"], width, hanging=len(start)))
        if decisions and not self._verbose:
            on = f"{sum(one['on'] for one in decisions)} of {len(decisions)} speedups on"
            self.terminal.say(f"{settings_of(run)}; {on} (--verbose shows each)")
        self._close()  # of an attempt that ran out of memory
        self._step, self._metrics = run.step, {}
        self._losses.clear()
        steps = {"total": run.last_step, "done": run.step, "unit": "steps"}
        task = self.terminal.task("Training", panel=self.panel, **steps)
        self._task = self._open.enter_context(task)
        self.on_tick(run.step, run.last_step)

    def on_tick(self, step: int, last_step: int) -> None:
        """Update the line of the steps."""
        if self._task is None:
            return
        if step > self._step:  # the time before the first step, of compiling, has no rate
            self._task.advance(step - self._step)
        self._step, self._last_step = step, last_step
        known = self._metrics
        facts = [show(known[name]) for name, show in LINE.items() if name in known]
        self._task.note(" · ".join([f"{step:,}/{last_step:,}", *facts]))

    def on_record(self, record: Mapping[str, float]) -> None:
        """Keep the latest metrics for the line. Print evaluations."""
        self._metrics = {**self._metrics, **record}
        if "train/loss" in record:
            self._losses.append(record["train/loss"])
        if "val/loss" in record:
            epoch = self._metrics.get("train/epoch")
            where = f"Step {record['step']:,.0f}" + (f", epoch {epoch:.1f}" if epoch else "")
            self.terminal.say(f"{where}: validation loss {record['val/loss']:.4f}")

    def on_event(self, event: JsonObject) -> None:
        """Print a line about an event. The last sample is part of the closing lines."""
        kind = str(event["event"])
        if kind == "sample" and self._step == self._last_step:
            return
        if kind == "early_stop":
            self._last_step = self._step
        elif kind in ("start", "resume"):
            self._decisions = []
        elif kind == "speedup" and self._task is None:  # later changes have their own messages
            self._decisions.append(event)
        elif kind == "stop":
            self._close()
        line = event_line(event)
        seen = kind if kind == "recompiled" else line  # others are in events.jsonl
        if line and seen not in self._said:
            self._said.add(seen or "")
            self.terminal.say(line)

    def on_end(self, summary: JsonObject) -> None:
        """Close the line of the steps."""
        self._close()

    def _close(self) -> None:
        self._task = None
        self._open.close()

    def panel(self) -> Table | None:
        """Return the panel below the line. None before the first loss, or on a small terminal.

        It is called in another thread.
        """
        known, losses, console = self._metrics, [*self._losses], self.terminal.console
        if console.width < MIN_COLUMNS or console.height < MIN_LINES or not losses:
            return None
        loss = [sparkline(losses, console.encoding)]
        if "val/loss" in known:
            loss.append(f"validation {known['val/loss']:.3f}")
        device = [text.format(known[name]) for name, text in DEVICE.items() if name in known]
        if known.get("perf/step_ms") and "perf/data_wait_ms" in known:
            device.append(f"data wait {known['perf/data_wait_ms'] / known['perf/step_ms']:.1%}")
        rows = Table.grid(padding=(0, 2))
        for name, texts in {"loss": loss, "device": device}.items():
            if text := " · ".join(filter(None, texts)):
                rows.add_row(Text(f"  {name}", style="dim"), Text(text))
        return rows


LINES: dict[str, Callable[[JsonObject], str]] = {
    "start": lambda event: (
        f"Training {amount(event['parameters'], 'parameters')} on {event['device']} "
        f"({event['device_reason']}): {event['machine']}"
    ),
    "resume": "Resuming at step {step:,} of {last_step:,} from {from_checkpoint}".format_map,
    "save": "Saved {path}".format_map,
    "evaluation": "Whole validation split: loss {loss:.4f} on {tokens:,} tokens".format_map,
    "sample": lambda event: f"Sample at step {event['step']:,}:\n{quoted(event['text'])}",
    "alarm": "Alarm: {text}".format_map,
    "alarm_over": "{text}".format_map,
    "logger": "{logger}: {text}".format_map,
    "compiled": lambda event: (
        f"Compiled in pieces: {event['graph_breaks']} breaks, {event['cuda_graphs_skipped']} "
        f"without CUDA graphs: {event['first_break'] or 'see the log of the compiler'}"
        if event["graph_breaks"] or event["cuda_graphs_skipped"]
        else ""
    ),
    "recompiled": lambda event: (
        f"Recompiled at step {event['step']:,}, {event['compile_s']:.0f} s: "
        f"{'; '.join(event['reasons']) or 'first call'}. Further recompilations are only counted."
    ),
    "upload": lambda event: (
        f"Sent step {event['step']:,} to {event['url']}: {amount(event['bytes'], 'bytes')}"
    ),
    "upload_failed": "Checkpoints cannot be sent to {url} now ({reason}). Training continues. They "
    "are sent later.".format_map,
    "upload_pending": lambda event: (
        f"Not yet sent to {event['url']}: step {', '.join(f'{step:,}' for step in event['steps'])} "
        f"({event['reason']}). The next start of this run sends it."
    ),
}
"""The line about each event. Empty if it needs none."""


def event_line(event: JsonObject) -> str | None:
    """Return a line about an event, None if it needs none."""
    if event["event"] in LINES:
        return LINES[event["event"]](event) or None
    if "logger" not in event:
        return None
    return (
        f"The logger {event['logger']} has failed and is disabled ({event['reason']}). "
        "Training continues. metrics.jsonl has the same metrics."
    )


def shown_in_cell(function: Any) -> Any:
    """Return `function`, wrapped to report to the notebook's cell by default.

    Passing `progress` or `observers` overrides that. Outside a notebook, and if it takes no
    `progress`, the function is returned unchanged.
    """
    if (
        not inspect.isfunction(function)
        or "progress" not in inspect.signature(function).parameters
        or not Console().is_jupyter
    ):
        return function
    takes_observers = "observers" in inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        terminal = Terminal()
        reports = {"progress": terminal} | (
            {"observers": (RunReport(terminal),)} if takes_observers else {}
        )
        try:
            return function(*values, **reports | named)
        finally:
            terminal.close()

    return call
