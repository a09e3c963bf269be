"""A run as it goes, and what it came to."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from flatout.errors import CheckpointError
from flatout.json_io import read_lines
from flatout.progress import Task
from flatout.terminal.figures import amount, columns, duration, printable, rows, wrapped
from flatout.terminal.lines import Terminal
from flatout.terminal.pace import Pace
from flatout.terminal.picture import curve

PICTURE_COLUMNS, PICTURE_ROWS = 60, (3, 8)
BESIDE_PICTURE = 11
"""Columns of the scale, and one to spare."""
UNDER_PICTURE = 3
"""Lines: the axis, its figures, and an empty one."""
SHORT_SAMPLE, SHORTEST_SAMPLE = 4, 3
"""Lines that are kept for it, and where there are too few even for that: its title, its text, and
an empty one.
"""
FACT_NAMES = 11
"""Columns of the names of what was measured."""
EPOCH_LINES_EVERY_S = 5.0
"""A short text is read many times a second; its epochs share a line."""


class RunReport:
    """A run as it goes: one calm line for the steps, one that stays for each evaluation, epoch,
    sample and save.

    With `verbose` each speedup has a line too, on or off, with the reason. Implements the observer
    of `training/metrics/observers.py`.
    """

    def __init__(self, terminal: Terminal, *, verbose: bool = False) -> None:
        self.terminal = terminal
        self._verbose = verbose
        self._context: AbstractContextManager[Task] | None = None
        self._task: Task | None = None
        self._step = 0
        self._last_step = -1
        self._said = ""
        self._decisions: list[Mapping[str, Any]] = []
        self._recompiled = False
        self._epoch = 0
        self._epoch_said_s = -math.inf
        self._losses: list[float] = []
        self._figures: Mapping[str, float] = {}
        self._pace = Pace(0, terminal.clock)

    def on_start(self, run: Any) -> None:
        """Say how many speedups are on, and open the line of the steps: the first one can take
        long.
        """
        width = self.terminal.console.width if self.terminal.interactive else None
        for line in (
            _every_speedup(self._decisions, width)
            if self._verbose
            else _count_of_speedups(self._decisions)
        ):
            self.terminal.say(line)
        self._decisions = []
        self._step, self._last_step = run.step, -1
        self._epoch = int(run.step / run.steps_per_epoch)
        self._pace = Pace(run.tokens_per_step, self.terminal.clock)
        self._context = self.terminal.task("Training", total=run.last_step, done=run.step)
        self._task = self._context.__enter__()
        self._task.note(f"{run.step:,}/{run.last_step:,}")

    def on_tick(self, step: int, last_step: int) -> None:
        """Move the line of the steps on."""
        if self._task is None:
            return
        self._task.advance(step - self._step)
        self._step, self._last_step = step, last_step
        self._pace.tick(step)
        self._task.note(" · ".join([f"{step:,}/{last_step:,}", *self._step_facts()]))

    def on_record(self, record: Mapping[str, float]) -> None:
        """Keep the newest figures for the line; an evaluation and a new epoch leave a line each."""
        self._figures = {**self._figures, **record}
        self._pace.record(record)
        if "train/loss" in record:
            self._losses.append(record["train/loss"])
        if "val/loss" in record:
            self.terminal.say(
                f"Step {record['step']:,.0f}: validation loss {record['val/loss']:.4f}"
            )
        epoch = int(record.get("train/epoch", self._epoch))
        if (
            epoch > self._epoch
            and record.get("wall_s", math.inf) - self._epoch_said_s >= EPOCH_LINES_EVERY_S
        ):
            mean = sum(self._losses) / len(self._losses) if self._losses else math.nan
            which = (
                f"Epoch {epoch}"
                if epoch == self._epoch + 1
                else f"Epochs {self._epoch + 1} to {epoch}"
            )
            self.terminal.say(
                f"{which} done at step {record['step']:,.0f}: mean training loss {mean:.4f}"
            )
            self._epoch, self._losses, self._epoch_said_s = epoch, [], record.get("wall_s", 0.0)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Leave a line for what happened; the last sample belongs to the closing lines."""
        if event.get("event") == "early_stop":
            self._last_step = self._step
        if event.get("event") == "sample" and self._step == self._last_step:
            return
        if event.get("event") in ("start", "resume"):
            self._decisions = []
        if event.get("event") == "speedup":
            if self._task is None:  # later ones have been said by what changed them
                self._decisions.append(event)
            return
        if event.get("event") == "stop":
            self._close()
        line = (
            _event_line(event)
            if event.get("event") != "recompiled"
            else self._recompiled_line(event)
        )
        if line and line != self._said:
            self._said = line
            self.terminal.say(line)

    def _step_facts(self) -> list[str]:
        """Return the loss, and the pace with the time that the rest takes at it."""
        found = [f"loss {self._figures['train/loss']:.3f}"] if "train/loss" in self._figures else []
        rates = self._pace.rates()
        if rates is None:
            return found
        found.append(f"{amount(rates.tokens_per_s)} tokens/s")
        if self._pace.is_steady and "perf/mfu" in self._figures:
            found.append(f"MFU {self._figures['perf/mfu']:.1%}")
        if self._step < self._last_step:
            found.append(f"{duration((self._last_step - self._step) / rates.steps_per_s)} left")
        return found

    def _recompiled_line(self, event: Mapping[str, Any]) -> str | None:
        """Return what to say of the first time that something was compiled again; all of them are
        in events.jsonl.
        """
        if self._recompiled:
            return None
        self._recompiled = True
        why = "; ".join(event["reasons"]) or "it had not been called before"
        return f"Compiled again at step {event['step']:,}, {event['compile_s']:.0f} s: {why}. Further times are only counted."

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Close the line of the steps; in a notebook, say what the run came to."""
        self._close()
        if self.terminal.is_cell:
            self.terminal.say(
                "; ".join(
                    text for name, text in _closing_facts(summary) if name in {"Trained", "Loss"}
                )
            )

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
        return f"Resuming at step {event['step']:,} of {event['last_step']:,} from {event['from_checkpoint']}"
    if kind == "compiled" and (event["graph_breaks"] or event["cuda_graphs_skipped"]):
        pieces = (
            f"{event['graph_breaks']} breaks, {event['cuda_graphs_skipped']} without CUDA graphs"
        )
        return f"Compiled in pieces: {pieces}: {event['first_break'] or 'the log of the compiler says why'}"
    if kind == "save":
        return f"Saved {event['path']}"
    if kind == "sample":
        return f"Sample at step {event['step']:,}:\n{indented(event['text'])}"
    if kind == "evaluation":
        return f"Whole validation split: loss {event['loss']:.4f} on {event['tokens']:,} tokens"
    if kind == "no_tensorboard":
        return f"TensorBoard's event file cannot be written any more ({event['reason']}); metrics.jsonl has the same figures."
    return None


def _count_of_speedups(decisions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if decisions:
        on = sum(decision["on"] for decision in decisions)
        yield f"{on} of {len(decisions)} optimisations on; `flatout list speedups` or --verbose shows each"


def _every_speedup(decisions: Sequence[Mapping[str, Any]], width: int | None) -> Iterator[str]:
    """Yield each with its reason, in columns; no line wider than `width`."""
    names = max((len(decision["name"]) for decision in decisions), default=0)
    for decision in decisions:
        start = f"  {'on ' if decision['on'] else 'off'}  {decision['name']:<{names}}  "
        yield wrapped(start + decision["reason"], width or sys.maxsize, hanging=len(start))


def indented(text: str) -> str:
    """Return text as a block that stands apart from the lines around it."""
    return "\n".join(f"  | {line}".rstrip() for line in printable(text).strip("\n").splitlines())


def closing(
    summary: Mapping[str, Any],
    *,
    next_steps: str = "",
    encoding: str | None = None,
    width: int | None = None,
    height: int | None = None,
) -> str:
    """Return the closing lines of a run: its last sample, `next_steps`, its loss curve, and last of
    all what was measured.

    `summary` is the run's summary.json; the curve and the sample come from the run folder it names.
    The curve uses characters that `encoding` (None: standard output's) has, and nothing is wider
    than `width` (None: the terminal's) but what cannot be broken, such as a path. Where `height`
    (None: the terminal's, if there is one) is short of lines, the curve is drawn lower and the
    sample cut, so that a screen shows all of it.
    """
    width, height = width or columns(), height or rows()
    encoding = encoding or sys.stdout.encoding or "ascii"
    folder = Path(summary["run"])
    facts = wrapped(
        "\n".join(f"{name:<{FACT_NAMES}}{text}" for name, text in _closing_facts(summary)), width
    )
    samples = [
        str(event.get("text"))
        for event in _readable(folder / "events.jsonl")
        if event.get("event") == "sample"
    ]
    sample = f"A sample:\n{wrapped(indented(samples[-1]), width)}" if samples else ""
    room = (
        math.inf if height is None else height - _num_lines(facts, next_steps)
    )  # the empty line after the last part is the shell's prompt
    tall = _within(PICTURE_ROWS, room - UNDER_PICTURE - (SHORT_SAMPLE if sample else 0))
    records = [
        {name: value for name, value in line.items() if isinstance(value, (int, float))}
        for line in _readable(folder / "metrics.jsonl")
    ]
    points = [(r["step"], r["train/loss"]) for r in records if {"step", "train/loss"} <= r.keys()]
    marks = [(r["step"], r["val/loss"]) for r in records if {"step", "val/loss"} <= r.keys()]
    drawn = curve(
        points,
        marks=marks,
        width=min(PICTURE_COLUMNS, max(width - BESIDE_PICTURE, 8)),
        height=tall,
        encoding=encoding,
    )
    sample = _cut(sample, room - _num_lines(drawn))
    return "\n\n".join(part for part in (sample, next_steps, drawn, facts) if part)


def _readable(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of the run; none where the disk refuses to read it: a finished run
    does not fail for want of a picture.
    """
    try:
        return list(read_lines(path))
    except CheckpointError:
        return []


def _num_lines(*parts: str) -> int:
    """Return the lines of parts, each with the empty one that sets it apart from the part before."""
    return sum(part.count("\n") + 2 for part in parts if part)


def _within(bounds: tuple[int, int], value: float) -> int:
    return int(min(max(value, bounds[0]), bounds[1]))


def _cut(sample: str, room: float) -> str:
    """Return the first lines of a sample that has no more room than that; the whole of it is in
    events.jsonl.
    """
    if _num_lines(sample) <= room:
        return sample
    lines = [line for line in sample.split("\n") if line != "  |"]
    return "\n".join(lines[: max(int(room), SHORTEST_SAMPLE) - 1])


def _closing_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for what the summary holds; what was not measured is left out, an unknown
    MFU says why.
    """
    value: Callable[[str], Any] = summary.get
    yield "Run", str(summary["run"])
    total = (
        f" ({duration(value('elapsed_s'))} in all)"
        if value("resumed_from") and value("elapsed_s")
        else ""
    )
    memory = f", {value('peak_gib'):.2f} GiB at most" if value("peak_gib") else ""
    yield (
        "Trained",
        f"{summary['steps']:,} steps, {amount(summary['tokens'], 'tokens')} in {duration(summary['wall_s'])}{total}{memory}",
    )
    losses = [f"training {value('train_loss'):.4f}"] if value("train_loss") is not None else []
    if value("val_loss") is not None:
        losses.append(
            f"validation {value('val_loss'):.4f} (perplexity {math.exp(min(value('val_loss'), 700)):.1f})"
        )
    if value("best_val_loss") is not None and value("best_step") not in {None, summary["steps"]}:
        losses.append(
            f"best in the run {value('best_val_loss'):.4f} at step {value('best_step'):,}"
        )
    if value("bits_per_byte") is not None:
        losses.append(f"{value('bits_per_byte'):.3f} bits a byte")
    if losses:
        yield "Loss", ", ".join(losses)
    rates = [f"{amount(value('tokens_per_s'))} tokens/s steady"] if value("tokens_per_s") else []
    besides = "evaluation, saving and compiling" if value("compile_s") else "evaluation and saving"
    rates += (
        [f"{amount(value('wall_tokens_per_s'))} tokens/s with {besides}"]
        if value("wall_tokens_per_s")
        else []
    )
    if rates:
        yield "Speed", ", ".join(rates)
    if value("mfu") is not None:
        yield "MFU", f"{value('mfu'):.1%} of the peak ({value('mfu_of')})"
    elif "mfu" in summary:
        why = str(value("mfu_of") or "no peak rate is known for this device")
        yield "MFU", why if why.startswith("unknown") else f"unknown: {why}"
