"""Shows a run while it trains: a line for its steps, a panel below it, and lines that stay."""

from __future__ import annotations

import functools
import inspect
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.cli.terminal.closing import closing_facts, indented
from flatout.cli.terminal.lines import OpenTask, Terminal, clean
from flatout.display import age, amount, duration, rate
from flatout.progress import counted
from flatout.storage.json_io import JsonObject
from flatout.storage.streams import can_show, wrapped

MIN_COLUMNS, MIN_LINES = 40, 12
"""A smaller terminal has no panel."""
BARS, MAX_BARS = "▁▂▃▄▅▆▇█", 20
"""Of the sparkline."""
MAX_LOSSES = 512
"""Most losses that are kept. Beyond that, only every second one is, and so on."""
RECORDS = 5
"""The rate is the median of this many latest records of metrics.jsonl."""
MIN_CLOCK_S = 1.0
"""Minimum time before the rate is taken from the clock."""
EPOCHS_EVERY_S = 5.0
"""Minimum time between lines about epochs. A short text has many epochs per second."""
DEVICE = {
    "mem/allocated_gib": "{:.2f} GiB",
    "mem/peak_gib": "{:.2f} GiB peak",
    "mem/reserved_gib": "{:.2f} GiB held",
    "gpu/util_pct": "GPU {:.0f}%",
    "gpu/power_w": "{:.0f} W",
}
"""Metrics of the panel's line about the device. Those that a run lacks have no place on it."""


def settings_of(run: Any) -> str:
    """Return the precision, the optimizer and the batch of a run."""
    config, batch, groups = run.config, run.config.batch, run.mesh.dp_size
    together = run.mesh.world_size // groups
    filled = run.recipe.filled_by
    optimizer = config.optim.kind
    if "optimizer" in filled:
        fused = filled["optimizer"].replace("-", " ")
        optimizer = fused if optimizer == "adamw" else f"{optimizer} with {fused}"
    parts = [
        f"{run.recipe.arithmetic(config.train.device)} matmuls",
        "compiled" if "compilation" in filled else "eager",
        optimizer,
        *([filled["activations"]] if "activations" in filled else []),
    ]
    product = counted(int(batch.rows_per_device), "row")
    if (batch.accumulate or 1) > 1:
        product += f" x {batch.accumulate:,} micro-batches"
    if groups > 1:
        product += f" x {groups:,} {'groups' if together > 1 else 'devices'}"
    shared = f", each on {together:,} devices," if together > 1 else ""
    tokens = f"{config.data.seq_len:,} tokens{shared} = {run.tokens_per_step:,} per step"
    return f"{', '.join(parts)}; {product} of {tokens}"


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
        self._context: AbstractContextManager[OpenTask] | None = None
        self._task: OpenTask | None = None
        self._last_line = ""
        self._decisions: list[JsonObject] = []
        self._has_recompiled = False
        self._requested_epochs: float | None = None
        self._reset(0, -1, 0, 0.0)

    def _reset(self, step: int, last_step: int, tokens_per_step: int, epochs: float) -> None:
        self._step, self._last_step, self._tokens_per_step = step, last_step, tokens_per_step
        self._first: tuple[int, float] | None = None
        """The first step that ended, and when."""
        self._metrics: Mapping[str, float] = {}
        self._losses: list[float] = []
        self._num_losses, self._every = 0, 1
        self._has_warmed_up, self._rates = False, deque[float](maxlen=RECORDS)
        """Tokens per second of the latest records but the first, which includes the warm-up."""
        self._epoch, self._epoch_losses, self._epoch_s = int(epochs), list[float](), 0.0
        """The last epoch with a line, the losses since then, and its time."""
        self._saved: tuple[int, float] | None = None
        self._alarms: Mapping[str, str] = {}
        self._num_alarms = 0

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
        done = run.step / run.steps_per_epoch
        self._reset(run.step, run.last_step, run.tokens_per_step, done)
        self._context = self.terminal.task(
            "Training", total=run.last_step, done=run.step, panel=self.panel
        )
        self._task = self._context.__enter__()
        self._task.note(f"{run.step:,}/{run.last_step:,}")

    def on_tick(self, step: int, last_step: int) -> None:
        """Update the line of the steps."""
        if self._task is None:
            return
        self._task.advance(step - self._step)
        self._step, self._last_step = step, last_step
        now_s = self.terminal.clock()
        self._first = self._first or (step, now_s)
        first, began_s = self._first
        pace = (step - first) / (now_s - began_s) if now_s - began_s >= MIN_CLOCK_S else 0.0
        tokens_per_s = statistics.median(self._rates or [pace * self._tokens_per_step])
        known = self._metrics
        facts = [
            f"{step:,}/{last_step:,}",
            f"loss {known['train/loss']:.3f}" if "train/loss" in known else "",
            rate(tokens_per_s) if tokens_per_s else "",
            self._mfu() if not self.terminal.interactive else "",  # else it is in the panel
            f"{duration((last_step - step) / pace)} left" if pace and step < last_step else "",
        ]
        self._task.note(" · ".join(filter(None, facts)))

    def on_record(self, record: Mapping[str, float]) -> None:
        """Keep the latest metrics for the line. Print evaluations and new epochs."""
        self._metrics = {**self._metrics, **record}
        if "perf/tokens_per_s" in record:
            self._rates += [record["perf/tokens_per_s"]] if self._has_warmed_up else []
            self._has_warmed_up = True
        if "train/loss" in record:
            self._epoch_losses.append(record["train/loss"])
            self._num_losses += 1
            if self._num_losses % self._every == 0:
                losses = [*self._losses, record["train/loss"]]
                if len(losses) == MAX_LOSSES:
                    losses, self._every = losses[1::2], 2 * self._every
                self._losses = losses
        if "val/loss" in record:
            self.terminal.say(
                f"Step {record['step']:,.0f}: validation loss {record['val/loss']:.4f}"
            )
        epoch, now_s = int(record.get("train/epoch", 0)), record.get("wall_s", 0.0)
        is_due = now_s - self._epoch_s >= EPOCHS_EVERY_S or record["step"] >= self._last_step
        if epoch > self._epoch and is_due:
            first, last = self._epoch + 1, self._requested_epochs
            which = f"Epoch {epoch}" if epoch == first else f"Epochs {first} to {epoch}"
            text = f"{which}{'' if last is None else f' of {last:g}'} done at step "
            text += f"{record['step']:,.0f}"
            if self._epoch_losses:
                text += f": mean training loss {statistics.fmean(self._epoch_losses):.4f}"
            if last is not None and now_s:
                text += f", {duration(now_s - self._epoch_s)}"
                samples = record.get("perf/samples_per_s")
                text += f", {amount(samples)} samples/s" if samples else ""
            self.terminal.say(text)
            self._epoch, self._epoch_losses, self._epoch_s = epoch, [], now_s

    def on_event(self, event: JsonObject) -> None:
        """Print a line about an event. The last sample is part of the closing lines."""
        kind = event.get("event")
        if kind == "sample" and self._step == self._last_step:
            return
        if kind == "early_stop":
            self._last_step = self._step
        elif kind in ("start", "resume"):
            self._decisions, self._requested_epochs = [], event.get("epochs")
        elif kind == "speedup" and self._task is None:  # later changes have their own messages
            self._decisions.append(event)
        elif kind == "save" and "step" in event:
            self._saved = event["step"], self.terminal.clock()
        elif kind == "alarm":
            self._num_alarms += 1
            self._alarms = {**self._alarms, event["kind"]: clean(event["text"])}
        elif kind == "alarm_over":
            self._alarms = {k: v for k, v in self._alarms.items() if k != event["kind"]}
        elif kind == "recompiled":  # later ones are in events.jsonl
            if self._has_recompiled:
                return
            self._has_recompiled = True
        elif kind == "stop":
            self._close()
        line = event_line(event)
        if line and line != self._last_line:
            self._last_line = line
            self.terminal.say(line)

    def on_end(self, summary: JsonObject) -> None:
        """Close the line of the steps. In a notebook, print the result."""
        self._close()
        for name, text in closing_facts(summary) if self.terminal.console.is_jupyter else ():
            if name in ("Trained", "Loss"):
                self.terminal.say(f"{name}: {text}")

    def _close(self) -> None:
        context, self._context, self._task = self._context, None, None
        if context:
            context.__exit__(None, None, None)

    def _mfu(self) -> str:
        is_known = self._rates and "perf/mfu" in self._metrics
        return f"MFU {self._metrics['perf/mfu']:.1%}" if is_known else ""

    def panel(self) -> Table | None:
        """Return the panel below the line. None before the first loss, or on a small terminal.

        It is called in another thread.
        """
        known, losses, console = self._metrics, self._losses, self.terminal.console
        if console.width < MIN_COLUMNS or console.height < MIN_LINES or not losses:
            return None
        loss = [sparkline(losses, console.encoding)]
        if "val/loss" in known:
            loss.append(f"validation {known['val/loss']:.3f}")
        device = [text.format(known[name]) for name, text in DEVICE.items() if name in known]
        device.insert(0, self._mfu())
        if known.get("perf/step_ms") and "perf/data_wait_ms" in known:
            device.append(f"data wait {known['perf/data_wait_ms'] / known['perf/step_ms']:.1%}")
        saved = ["nothing yet"]
        if self._saved is not None:
            step, at_s = self._saved  # in steps of time that are calm to watch
            ago_s = self.terminal.clock() - at_s
            saved = [f"step {step:,}, {'just now' if ago_s < 10 else f'{age(ago_s)} ago'}"]
        if self._num_alarms:
            saved.append(amount(self._num_alarms, "alarms"))
        lines = {"loss": loss, "device": device, "saved": saved}
        rows = Table.grid(padding=(0, 2))
        for name, texts in lines.items():
            if text := " · ".join(filter(None, texts)):
                rows.add_row(Text(f"  {name}", style="dim"), Text(text))
        for alarm in [*self._alarms.values()][-1:]:
            rows.add_row(Text("  alarm", style="dim"), Text(alarm, style="yellow"))
        return rows


LINES = {
    "resume": "Resuming at step {step:,} of {last_step:,} from {from_checkpoint}",
    "save": "Saved {path}",
    "evaluation": "Whole validation split: loss {loss:.4f} on {tokens:,} tokens",
    "alarm": "Alarm: {text}",
    "alarm_over": "{text}",
    "logger": "{logger}: {text}",
    "no_tensorboard": "TensorBoard's event file can no longer be written ({reason}). "
    "metrics.jsonl has the same metrics.",
    "upload_failed": "Checkpoints cannot be sent to {url} now ({reason}). Training continues. They "
    "are sent later.",
    "upload_dropped": "Step {step:,} was deleted here before it could be sent to {url}: saves are "
    "faster than uploads.",
}
"""The line about each event that needs nothing but its metrics."""


def event_line(event: JsonObject) -> str | None:
    """Return a line about an event, None if it needs none."""
    match event.get("event"):
        case "start":
            size = amount(event["parameters"], "parameters")
            device = f"{event['device']} ({event['device_reason']})"
            return f"Training {size} on {device}: {event['machine']}"
        case "compiled" if event["graph_breaks"] or event["cuda_graphs_skipped"]:
            pieces = f"{event['graph_breaks']} breaks, "
            pieces += f"{event['cuda_graphs_skipped']} without CUDA graphs"
            why = event["first_break"] or "the compiler's log shows why"
            return f"Compiled in pieces: {pieces}: {why}"
        case "recompiled":
            why = "; ".join(event["reasons"]) or "first call"
            return (
                f"Recompiled at step {event['step']:,}, {event['compile_s']:.0f} s: {why}. "
                "Further recompilations are only counted."
            )
        case "sample":
            return f"Sample at step {event['step']:,}:\n{indented(event['text'])}"
        case "upload":
            size = amount(event["bytes"], "bytes")
            return f"Sent step {event['step']:,} to {event['url']}: {size}"
        case "upload_failed" if "fix" in event:
            return (
                f"Checkpoints are no longer sent to {event['url']}. {event['reason']}. Training "
                f"continues here. {event['fix']}"
            )
        case "upload_pending":
            steps = ", ".join(f"{step:,}" for step in event["steps"])
            return (
                f"Not yet sent to {event['url']}: step {steps} ({event['reason']}). The next start "
                "of this run sends it."
            )
        case kind if kind in LINES:
            return LINES[kind].format_map(event)
    if "logger" in event:
        return (
            f"The logger {event['logger']} has failed and is disabled ({event['reason']}). "
            "Training continues. metrics.jsonl has the same metrics."
        )
    return None


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
