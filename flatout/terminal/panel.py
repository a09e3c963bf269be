"""The panel of a run: a few lines of figures below its progress bar, redrawn in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from flatout.figures import amount, duration
from flatout.json_io import JsonObject
from flatout.streams import printable
from flatout.terminal.picture import sparkline

NAMES = 10
"""Columns of the names of the lines, with the margin before them."""
MIN_COLUMNS = 40
"""A narrower terminal has no panel; the line of the steps shows the main figures."""
WIDE = 72
"""Columns from which the sparkline is long."""
LONG_SPARK, SHORT_SPARK = 20, 12
MAX_LOSSES = 512
"""Most points of the loss that are kept; beyond that, each is the mean of twice the records."""


class _Loss(NamedTuple):
    step: float
    value: float


class Panel:
    """Collects what a run reports; `lines` shows it.

    Figures that a run does not have, such as those of a GPU, have no place on it.
    """

    def __init__(self, clock: Callable[[], float], *, encoding: str = "utf-8") -> None:
        self._clock, self._encoding = clock, encoding
        self._losses: tuple[_Loss, ...] = ()
        self._group: list[float] = []
        self._group_size = 1
        self._figures: Mapping[str, float] = {}
        self._rates: Sequence[str] = ()
        self._saved: tuple[int, float] | None = None
        self._alarms: Mapping[str, str] = {}
        self._num_alarms = 0

    def record(self, record: Mapping[str, float]) -> None:
        """Take a line of metrics.jsonl."""
        self._figures = {**self._figures, **record}
        if "train/loss" in record:
            self._add(record["step"], record["train/loss"])

    def _add(self, step: float, loss: float) -> None:
        self._group.append(loss)
        if len(self._group) < self._group_size:
            return
        losses = (*self._losses, _Loss(step, sum(self._group) / len(self._group)))
        self._group.clear()
        if len(losses) == MAX_LOSSES:
            losses = _halved(losses)
            self._group_size *= 2
        self._losses = losses

    def event(self, event: JsonObject) -> None:
        """Take a line of events.jsonl."""
        kind = event.get("event")
        if kind == "save" and "step" in event:
            self._saved = event["step"], self._clock()
        if kind == "alarm":
            self._num_alarms += 1
            self._alarms = {**self._alarms, event["kind"]: printable(event["text"])}
        if kind == "alarm_over":
            self._alarms = {k: v for k, v in self._alarms.items() if k != event["kind"]}

    def rates(self, facts: Sequence[str]) -> None:
        """Take the current rates, which the line of the steps shows in a log."""
        self._rates = tuple(facts)

    def lines(self, width: int) -> list[Text]:
        """Return the lines for a terminal of `width` columns; none before the first figures."""
        if width < MIN_COLUMNS or not self._losses:
            return []
        return [
            _line(name, facts, width - NAMES, style)
            for name, facts, style in (
                ("loss", self._loss(LONG_SPARK if width >= WIDE else SHORT_SPARK), ""),
                ("speed", self._speed(), ""),
                ("memory", self._memory(), ""),
                ("saved", self._safety(), ""),
                ("alarm", list(self._alarms.values())[-1:], "yellow"),
            )
            if facts
        ]

    def _loss(self, cells: int) -> list[str]:
        losses = self._losses
        recent = losses[len(losses) // 2 :] if len(losses) >= 8 else losses
        drawn = sparkline([loss.value for loss in recent], cells, encoding=self._encoding)
        found = [f"{self._figures['train/loss']:.3f} {drawn}".rstrip()]
        if "val/loss" in self._figures:
            found.append(f"validation {self._figures['val/loss']:.3f}")
        if len(recent) >= 8:
            quarter = len(recent) // 4
            change = _mean(recent[-quarter:]) - _mean(recent[:quarter])
            found.append(f"{change:+.3f} since step {recent[0].step:,.0f}")
        return found

    def _speed(self) -> list[str]:
        found, figures = list(self._rates), self._figures
        if figures.get("perf/step_ms") and "perf/data_wait_ms" in figures:
            share = figures["perf/data_wait_ms"] / figures["perf/step_ms"]
            found.append(f"data wait {share:.1%}")
        return found

    def _memory(self) -> list[str]:
        figures = self._figures
        shown = (
            ("mem/allocated_gib", ".2f", "{} GiB"),
            ("mem/peak_gib", ".2f", "{} GiB peak"),
            ("gpu/util_pct", ".0f", "GPU {}%"),
            ("gpu/power_w", ".0f", "{} W"),
            ("mem/reserved_gib", ".2f", "{} GiB held"),
        )
        return [
            text.format(format(figures[name], digits))
            for name, digits, text in shown
            if name in figures
        ]

    def _safety(self) -> list[str]:
        found = ["nothing yet"]
        if self._saved is not None:
            step, at_s = self._saved
            found = [f"step {step:,}, {_ago(self._clock() - at_s)}"]
        if self._num_alarms:
            found.append(amount(self._num_alarms, "alarm" if self._num_alarms == 1 else "alarms"))
        return found


def _ago(seconds: float) -> str:
    """Return how long ago something was, in steps that are calm to watch."""
    if seconds < 10:
        return "just now"
    minutes = int(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s ago"
    return f"{minutes} min ago" if minutes < 60 else f"{duration(60 * minutes)} ago"


def _line(name: str, facts: Sequence[str], room: int, style: str) -> Text:
    """Return a line with as many facts as fit; the first one is cut if it must be."""
    shown = facts[0]
    for fact in facts[1:]:
        if len(shown) + len(fact) + 3 > room:
            break
        shown += f" · {fact}"
    if len(shown) > room:
        shown = shown[: room - 3] + "..."
    return Text.assemble((f"  {name:<{NAMES - 2}}", "dim"), (shown, style))


def _halved(losses: Sequence[_Loss]) -> tuple[_Loss, ...]:
    """Return an even number of losses with neighbours averaged."""
    return tuple(
        _Loss(second.step, (first.value + second.value) / 2)
        for first, second in zip(losses[::2], losses[1::2], strict=True)
    )


def _mean(losses: Sequence[_Loss]) -> float:
    return sum(loss.value for loss in losses) / len(losses)
