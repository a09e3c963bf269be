"""Shows a run while it trains: a line for its steps, a panel below it, and lines that stay."""

from __future__ import annotations

import functools
import inspect
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.text import Text

from flatout.cli.terminal.closing import closing_facts, indented
from flatout.cli.terminal.lines import OpenTask, Terminal
from flatout.cli.terminal.picture import sparkline
from flatout.display import age, amount, duration
from flatout.progress import counted, readable_size
from flatout.storage.json_io import JsonObject
from flatout.storage.streams import printable, wrapped

NAMES = 10
"""Columns of the names of the panel's lines, with the margin before them."""
MIN_COLUMNS = 40
"""A narrower terminal has no panel. The line of the steps shows the main metrics."""
WIDE = 72
"""Columns from which the sparkline is long."""
LONG_SPARK, SHORT_SPARK = 20, 12
MAX_LOSSES = 512
"""Most losses that are kept. Beyond that, only every second one is, and so on."""
RECORDS = 5
"""The rate is the median of this many latest records of metrics.jsonl."""
MIN_CLOCK_S = 1.0
"""Minimum time before the rate is taken from the clock."""
EPOCHS_EVERY_S = 5.0
"""Minimum time between lines about epochs. A short text has many epochs per second."""
MEMORY = (
    ("mem/allocated_gib", "{:.2f} GiB"),
    ("mem/peak_gib", "{:.2f} GiB peak"),
    ("gpu/util_pct", "GPU {:.0f}%"),
    ("gpu/power_w", "{:.0f} W"),
    ("mem/reserved_gib", "{:.2f} GiB held"),
)
"""Metrics of the panel's line about memory. Those that a run lacks have no place on it."""


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
        self._epochs: Epochs | None = None
        self._requested_epochs: float | None = None
        self._reset(0, 0)

    def _reset(self, step: int, tokens_per_step: int) -> None:
        self._step, self._last_step = step, -1
        self._pace = Pace(tokens_per_step, self.terminal.clock)
        self._figures: Mapping[str, float] = {}
        self._losses: tuple[tuple[float, float], ...] = ()
        self._num_losses, self._every = 0, 1
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
            on = sum(one["on"] for one in decisions)
            text = (
                f"{settings_of(run)}; {on} of {len(decisions)} speedups on (--verbose shows each)"
            )
            self.terminal.say(wrapped(text, width))
        self._reset(run.step, run.tokens_per_step)
        self._epochs = Epochs(
            run.step / run.steps_per_epoch, total=self._requested_epochs, last_step=run.last_step
        )
        self._context = self.terminal.task("Training", total=run.last_step, done=run.step)
        self._task = self._context.__enter__()
        self._task.note(f"{run.step:,}/{run.last_step:,}")
        self._task.below = self.panel

    def on_tick(self, step: int, last_step: int) -> None:
        """Update the line of the steps."""
        if self._task is None:
            return
        self._task.advance(step - self._step)
        self._step, self._last_step = step, last_step
        self._pace.tick(step)
        where, steps_per_s, left = f"{step:,}/{last_step:,}", self._pace.average(), []
        if steps_per_s and step < last_step:
            left = [f"{duration((last_step - step) / steps_per_s)} left"]
        loss = self._figures.get("train/loss")
        facts = [] if loss is None else [f"loss {loss:.3f}"]
        self._task.headline = " · ".join([where, *left])
        self._task.note(" · ".join([where, *facts, *self._rates(), *left]))

    def on_record(self, record: Mapping[str, float]) -> None:
        """Keep the latest metrics for the line. Print evaluations and new epochs."""
        self._figures = {**self._figures, **record}
        self._pace.record(record)
        if "train/loss" in record:
            self._num_losses += 1
            if self._num_losses % self._every == 0:
                losses = (*self._losses, (record["step"], record["train/loss"]))
                if len(losses) == MAX_LOSSES:
                    losses, self._every = losses[1::2], 2 * self._every
                self._losses = losses
        if "val/loss" in record:
            self.terminal.say(
                f"Step {record['step']:,.0f}: validation loss {record['val/loss']:.4f}"
            )
        if line := self._epochs.line(record) if self._epochs else None:
            self.terminal.say(line)

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
            self._alarms = {**self._alarms, event["kind"]: printable(event["text"])}
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
        if self.terminal.is_cell:
            for name, text in closing_facts(summary):
                if name in ("Trained", "Loss"):
                    self.terminal.say(f"{name}: {text}")

    def _close(self) -> None:
        context, self._context, self._task = self._context, None, None
        if context:
            context.__exit__(None, None, None)

    def _rates(self) -> list[str]:
        rates = self._pace.rates()
        found = [f"{amount(rates[1])} tokens/s"] if rates else []
        if self._pace.is_steady and "perf/mfu" in self._figures:
            found.append(f"MFU {self._figures['perf/mfu']:.1%}")
        return found

    def panel(self, width: int) -> list[Text]:
        """Return the panel for a terminal of `width` columns. Empty before the first loss.

        It is called in another thread.
        """
        figures, losses, encoding = self._figures, self._losses, self.terminal.encoding
        if width < MIN_COLUMNS or not losses:
            return []
        values = [value for _, value in losses]
        drawn = sparkline(values, LONG_SPARK if width >= WIDE else SHORT_SPARK, encoding=encoding)
        loss = [f"{figures['train/loss']:.3f} {drawn}".rstrip()]
        if "val/loss" in figures:
            loss.append(f"validation {figures['val/loss']:.3f}")
        half, eighth = len(values) // 2, (len(values) + 1) // 8
        if eighth > 1:
            change = statistics.fmean(values[-eighth:]) - statistics.fmean(values[half:][:eighth])
            loss.append(f"{change:+.3f} since step {losses[half][0]:,.0f}")
        speed = self._rates()
        if figures.get("perf/step_ms") and "perf/data_wait_ms" in figures:
            speed.append(f"data wait {figures['perf/data_wait_ms'] / figures['perf/step_ms']:.1%}")
        saved = ["nothing yet"]
        if self._saved is not None:
            step, at_s = self._saved  # in steps of time that are calm to watch
            ago_s = self.terminal.clock() - at_s
            ago = age(ago_s) if ago_s < 3600 else duration(ago_s // 60 * 60)
            saved = [f"step {step:,}, {'just now' if ago_s < 10 else f'{ago} ago'}"]
        if self._num_alarms:
            saved.append(amount(self._num_alarms, "alarms"))
        memory = [text.format(figures[name]) for name, text in MEMORY if name in figures]
        alarm = list(self._alarms.values())[-1:]
        lines = {"loss": loss, "speed": speed, "memory": memory, "saved": saved, "alarm": alarm}
        return [
            Text.assemble(
                (f"  {name:<{NAMES - 2}}", "dim"),
                (_fitting(facts, width - NAMES), "yellow" if name == "alarm" else ""),
            )
            for name, facts in lines.items()
            if facts
        ]


def _fitting(facts: Sequence[str], room: int) -> str:
    """Return as many facts as fit. The first one is cut if it must be."""
    shown = facts[0]
    for fact in facts[1:]:
        if len(shown) + len(fact) + 3 > room:
            break
        shown += f" · {fact}"
    return shown if len(shown) <= room else shown[: room - 3] + "..."


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
            size = readable_size(event["bytes"])
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


class Pace:
    """The pace of one process's steps, excluding compilation and the first step.

    The rate excludes other work. It comes from the run's records, except the first one, which
    includes the warm-up. Until the second record it is the average by the clock, which also counts
    evaluations and saves.
    """

    def __init__(self, tokens_per_step: int, clock: Callable[[], float]) -> None:
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._first_tick: tuple[int, float] | None = None
        self._step = 0
        self._has_warmed_up = False
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECORDS)

    def tick(self, step: int) -> None:
        """Register that `step` has ended."""
        self._step = step
        self._first_tick = self._first_tick or (step, self._clock())

    def record(self, record: Mapping[str, float]) -> None:
        """Register a record of metrics.jsonl, if it has rates."""
        if {"perf/steps_per_s", "perf/tokens_per_s"} <= record.keys():
            if self._has_warmed_up:
                self._recent.append((record["perf/steps_per_s"], record["perf/tokens_per_s"]))
            self._has_warmed_up = True

    @property
    def is_steady(self) -> bool:
        """Whether there is a record without the warm-up."""
        return bool(self._recent)

    def rates(self) -> tuple[float, float] | None:
        """Return the latest steps and tokens per second, None while they are unknown."""
        if self._recent:
            steps, tokens = zip(*self._recent, strict=True)
            return statistics.median(steps), statistics.median(tokens)
        average = self.average()
        return (average, average * self._tokens_per_step) if average else None

    def average(self) -> float | None:
        """Return the steps per second since the first one, with evaluations and saves."""
        if self._first_tick is None:
            return None
        step, start_s = self._first_tick
        seconds = self._clock() - start_s
        return (self._step - step) / seconds if seconds >= MIN_CLOCK_S else None


class Epochs:
    """Shows when epochs are done, with time and samples/s where `total` epochs were requested."""

    def __init__(self, done: float, *, total: float | None, last_step: int) -> None:
        self._epoch = int(done)
        self._total, self._last_step = total, last_step
        self._began_s: float | None = None
        self._losses: list[float] = []
        self._rates: list[float] = []

    def line(self, record: Mapping[str, float]) -> str | None:
        """Take a line of metrics.jsonl, and return the line that is due about epochs, if any."""
        for name, values in (("train/loss", self._losses), ("perf/samples_per_s", self._rates)):
            values += [record[name]] if name in record else []
        epoch, first = int(record.get("train/epoch", self._epoch)), self._epoch + 1
        now_s, began_s = record.get("wall_s", math.inf), self._began_s
        is_last = self._total is not None and record["step"] >= self._last_step
        is_due = is_last or began_s is None or now_s - began_s >= EPOCHS_EVERY_S
        if epoch < first or not is_due:
            return None
        loss = f"mean training loss {statistics.fmean(self._losses):.4f}" if self._losses else ""
        which = f"Epoch {epoch}" if epoch == first else f"Epochs {first} to {epoch}"
        of = "" if self._total is None else f" of {self._total:g}"
        line = f"{which}{of} done at step {record['step']:,.0f}: {loss or 'no target'}"
        if self._total is not None and "wall_s" in record:
            line += f", {duration(now_s - (began_s or 0.0))}"
            rate = statistics.median(self._rates) if self._rates else 0.0
            line += f", {amount(rate)} samples/s" if rate else ""
        self._epoch, self._losses, self._rates = epoch, [], []
        self._began_s = record.get("wall_s", 0.0)
        return line


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
