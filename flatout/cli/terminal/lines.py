"""Shows long operations: with rich on a terminal or in a notebook, as plain lines in a log."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from flatout.display import amount, duration
from flatout.errors import without_secrets
from flatout.storage.streams import printable, wrapped

APPEARS_AFTER_S = 0.1
FIRST_PLAIN_S, PLAIN_EVERY_S, UNCOUNTED_EVERY_S = 2.0, 5.0, 15.0
"""Time until a log line about an operation, between two, and after one without a count."""
TICK_S = 0.25
RATE_WINDOW_S = 600.0
"""Time over which a rate is measured: with evaluations, and calm to watch."""
WIDE = 100
"""Columns of a terminal from which there is a bar."""


COLOURS = {
    r"`[^`\n]+`": "cyan",
    r"(?m)^Alarm:.*": "yellow",
    r"(?m)\bloss \d+\.\d+": "bold",
    r"(?m)^[A-Z][a-z ]*[a-z](?=  )": "bold",
}
"""What stands out in a text, by its pattern: commands, alarms, losses, names of values."""


def coloured(text: str) -> Text:
    """Return a text with `COLOURS`, which a console leaves out for NO_COLOR or TERM=dumb."""
    shown = Text(text)
    for pattern, style in COLOURS.items():
        shown.highlight_regex(pattern, style)
    return shown


def clean(text: str) -> str:
    """Return text without secrets in URLs and without characters that move the cursor."""
    return printable(without_secrets(text))


def facts(task: Task) -> str:
    """Return what a line says after the name of an operation.

    One without a unit may say more in its note.
    """
    unit, note = task.fields["unit"], task.fields["note"]
    rate = task.speed if unit else None
    left = task.time_remaining if rate and not task.finished else None
    found = [
        f"{task.percentage:.0f}%" if task.total else "",
        note,
        f"{amount(rate, unit)}/s" if rate else "" if note else duration(task.elapsed or 0.0),
        f"{duration(left)} left" if left else "",
    ]
    return " · ".join(filter(None, found))


class _Facts(ProgressColumn):
    def __init__(self) -> None:
        super().__init__(table_column=Column(overflow="fold"))

    def render(self, task: Task) -> Text:
        return Text(facts(task), style="dim")


class _Lines(Progress):
    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield a line for each operation that takes a moment, with the panel of a run below."""
        shown = [task for task in self.tasks if (task.elapsed or 0.0) >= APPEARS_AFTER_S]
        if shown:
            yield self.make_tasks_table(shown)
        yield from filter(None, (task.fields["panel"]() for task in shown))


class OpenTask:
    """One operation in progress. Implements `progress.Task`."""

    def __init__(self, lines: Progress, number: TaskID) -> None:
        self._lines, self.number = lines, number

    def advance(self, amount: float = 1) -> None:
        """Add `amount` units to those done."""
        self._lines.advance(self.number, amount)

    def note(self, text: str) -> None:
        """Show a short text beside the operation, replacing the previous one."""
        self._lines.update(self.number, note=clean(text))


class Terminal:
    """Shows the progress of long operations. Implements `progress.Progress`.

    On a terminal, and in a notebook with ipywidgets, the lines are redrawn. A log gets plain lines.
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=False)
        self.clock = clock
        self.lines = _Lines(
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}", markup=False),
            *([BarColumn(24)] if self.console.width >= WIDE else []),
            _Facts(),
            console=self.console,
            refresh_per_second=6,
            speed_estimate_period=RATE_WINDOW_S,
            transient=True,
            redirect_stdout=False,
            get_time=clock,
        )
        self._lock = threading.RLock()
        self._ticker: threading.Thread | None = None
        self._next_plain = 0.0

    @property
    def interactive(self) -> bool:
        """Whether a line can be redrawn."""
        if self.console.is_jupyter:
            return importlib.util.find_spec("ipywidgets") is not None
        return self.console.is_terminal and not self.console.is_dumb_terminal

    @contextmanager
    def task(
        self,
        what: str,
        *,
        total: float | None = None,
        unit: str = "",
        done: float = 0.0,
        panel: Callable[[], RenderableType | None] = lambda: None,
    ) -> Iterator[OpenTask]:
        """Start an operation called `what`, of which `done` units are already done.

        With a known `total`, the time left is shown. `panel` returns what is shown below the lines.
        It is called in another thread.
        """
        fields: dict[str, Any] = {"unit": unit, "note": "", "panel": panel}
        with self._lock:
            is_outermost = not self.lines.tasks
            number = self.lines.add_task(clean(what), total=total, completed=int(done), **fields)
            task = self.lines.tasks[-1]
            if is_outermost:
                self._start()
        try:
            yield OpenTask(self.lines, number)
        finally:
            with self._lock:
                if number in self.lines.task_ids:
                    self.lines.remove_task(number)
                is_empty = not self.lines.tasks
            if is_empty:
                self._stop()
        seconds = task.elapsed or 0.0
        if is_outermost and seconds >= 1:
            counted = f"{amount(task.completed, unit)} in " if unit and task.completed else ""
            self.say(f"{task.description}: {counted}{duration(seconds)}")

    def say(self, line: str) -> None:
        """Print one permanent line. A terminal wraps it at spaces."""
        line = clean(line)
        text = wrapped(line, self.console.width) if self.interactive else line
        self.console.print(coloured(text), soft_wrap=True)

    def close(self) -> None:
        """Remove the lines in progress, for example before an error is printed."""
        with self._lock:
            for number in self.lines.task_ids:
                self.lines.remove_task(number)
        self._stop()

    def _start(self) -> None:
        if self.interactive:
            self.lines.start()
            return
        self._next_plain = max(self._next_plain, self.clock() + FIRST_PLAIN_S)
        if self._ticker is None:
            ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
            ticker.start()
            self._ticker = ticker

    def _stop(self) -> None:
        with suppress(IndexError):  # a signal came while it started, before rich had its hook
            self.lines.live.stop()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self._lock:
                if not self.lines.tasks:
                    self._ticker = None
                    return
                self.tell()

    def tell(self) -> None:
        """Print a line about the innermost operation, if one is due."""
        with self._lock:
            now_s, tasks = self.clock(), self.lines.tasks
            if not tasks or now_s < self._next_plain:
                return
            is_counted = tasks[-1].total or tasks[-1].fields["unit"]
            self._next_plain = now_s + (PLAIN_EVERY_S if is_counted else UNCOUNTED_EVERY_S)
            self.say(f"{tasks[-1].description}: {facts(tasks[-1])}")
