"""Shows long operations on a terminal, in a notebook's cell, or as plain lines in a log."""

from __future__ import annotations

import importlib
import io
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from flatout.display import amount, duration
from flatout.errors import without_secrets
from flatout.storage.streams import printable, wrapped

APPEARS_AFTER_S = 0.1
PLAIN_EVERY_S = 5.0
UNCOUNTED_EVERY_S = 15.0
"""Time between two log lines about an operation without a count."""
TICK_S = 0.25
REDRAWS_PER_S = 6
RATE_WINDOW_S = 10.0
CELL_COLUMNS = 100
MAX_BAR, MIN_BAR = 24, 6
"""Columns of a progress bar. With fewer than MIN_BAR left, there is none."""


class OpenTask:
    """One operation in progress, and the facts shown about it."""

    def __init__(
        self, clock: Callable[[], float], what: str, total: float | None, unit: str, done: float
    ) -> None:
        self.what = printable(without_secrets(what))
        self.unit = unit
        self.text = ""
        self.headline = ""
        """Shown in place of `text` where there are lines below."""
        self.below: Callable[[int], Sequence[Text]] = lambda width: ()
        """Returns the lines below it on a screen of that many columns. Called in another thread."""
        self.shown_s: float | None = None
        """When the log last had a line about it."""
        self._clock, self._began_s = clock, clock()
        self._total, self._done, self._done_before = total, done, done
        self._recent: deque[tuple[float, float]] = deque()
        """When something was done in the last RATE_WINDOW_S, and how much was done then."""

    def advance(self, amount: float = 1) -> None:
        """Add `amount` units to those done."""
        now_s = self._clock()
        self._done += amount
        self._recent.append((now_s, self._done))
        while self._recent[0][0] < now_s - RATE_WINDOW_S:
            self._recent.popleft()

    def note(self, text: str) -> None:
        """Show a short text beside the operation, replacing the previous one."""
        self.text = printable(without_secrets(text))

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the operation."""
        return self._clock() - self._began_s

    @property
    def is_counted(self) -> bool:
        """Whether later lines about it show more than the elapsed time."""
        return bool(self._total or self.unit)

    @property
    def share(self) -> float | None:
        """The share that is done, None without a total."""
        return min(self._done / self._total, 1.0) if self._total else None

    def rate(self) -> float:
        """Return units per second over the last ten seconds, 0 while it is unknown."""
        if len(self._recent) < 2:
            return 0.0
        (start_s, before), (end_s, after) = self._recent[0], self._recent[-1]
        return (after - before) / (end_s - start_s) if end_s > start_s else 0.0

    def facts(self, text: str | None = None) -> list[str]:
        """Return the facts that a line shows after the name, with `text` in place of the note.

        An operation without a unit gives its rate and the time left in its note.
        """
        text = self.text if text is None else text
        rate = self.rate() if self.unit else 0.0
        found = [f"{self.share:.0%}"] if self.share is not None else []
        found += [text] if text else []
        if rate > 0:
            found.append(f"{amount(rate, self.unit)}/s")
        elif self.unit or not self._total or self._done == self._done_before:
            found.append(duration(self.elapsed))
        if self._total and rate > 0 and self._done < self._total:
            found.append(f"{duration((self._total - self._done) / rate)} left")
        return found

    def closing_line(self) -> str | None:
        """Return the permanent line for the end of the operation. None if it would be empty."""
        is_in_log = self.shown_s is not None and not self.is_counted
        if self.elapsed < 1 or (is_in_log and self.elapsed < UNCOUNTED_EVERY_S):
            return None
        counted = f"{amount(self._done, self.unit)} in " if self.unit and self._done else ""
        return f"{self.what}: {counted}{duration(self.elapsed)}"

    def block(self, width: int, height: int, *, nested: bool) -> RenderableType:
        """Return the operation's line, with the lines below it if all fit the screen."""
        below = self.below(width)
        if not below or len(below) >= height // 2:
            return self.line(width, self.facts(), nested=nested)
        return Group(self.line(width, self.facts(self.headline), nested=nested), *below)

    def line(self, width: int, facts: list[str], *, nested: bool) -> RenderableType:
        """Return the operation on one line. A narrow line drops the bar, then the percentage."""
        room = width - len(self.what) - 4
        if self.text and len(" · ".join(facts)) > room:
            facts = [fact for fact in facts if not fact.endswith("%") or " " in fact]
        bar = min(MAX_BAR, room - len(" · ".join(facts)) - 1)
        cells: list[RenderableType] = [
            Text(" ") if nested else Spinner("dots", style="cyan"),
            Text(self.what),
        ]
        if self.share is not None and bar >= MIN_BAR:
            cells.append(ProgressBar(total=1.0, completed=self.share, width=bar))
        cells.append(Text(" · ".join(facts), style="dim"))
        row = Table.grid(padding=(0, 1, 0, 0))
        for index in range(len(cells)):
            name_width = len(self.what) if index == 1 else None
            row.add_column(no_wrap=True, overflow="ellipsis", min_width=name_width)
        row.add_row(*cells)
        return row


class CellBlock:
    """The block of output of a notebook's cell, updated in place: lines, and what is in progress.

    Each execution has its own block. IPython is running.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cell: int | None = None
        self._handle: Any = None
        self._lines: list[str] = []
        self._in_progress = ""
        self._shown = ""

    def show(self, line: str | None = None, in_progress: str | None = None) -> None:
        """Add a permanent line, or replace the lines of the operations in progress."""
        with self._lock:
            cell = importlib.import_module("IPython").get_ipython().execution_count
            if cell != self._cell:
                self._cell, self._handle, self._lines = cell, None, []
                self._in_progress = self._shown = ""
            if line is not None:
                self._lines.append(line)
            if in_progress is not None:
                self._in_progress = in_progress
            text = "\n".join(filter(None, [*self._lines, self._in_progress]))
            if text == self._shown:
                return
            self._shown, bundle = text, {"text/plain": text}
            if self._handle is None:
                display = importlib.import_module("IPython.display").display
                self._handle = display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)


class Terminal:
    """Shows the progress of long operations. Implements `progress.Progress`.

    On a terminal and in a notebook's cell the lines are redrawn. A log gets plain lines.
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=False)
        self.clock = clock
        self._lock = threading.RLock()
        self._open: list[OpenTask] = []
        self._live: Live | None = None
        self._ticker: threading.Thread | None = None
        self._all_closed = threading.Event()
        self._last_plain = -math.inf
        self._cell = CellBlock() if self.console.is_jupyter else None

    @property
    def interactive(self) -> bool:
        """Whether this is a terminal that can redraw a line."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    @property
    def is_cell(self) -> bool:
        """Whether it writes to the cell of a notebook."""
        return self._cell is not None

    @property
    def encoding(self) -> str:
        """The encoding of what is shown."""
        return "utf-8" if self.is_cell else self.console.encoding

    @contextmanager
    def task(
        self, what: str, *, total: float | None = None, unit: str = "", done: float = 0.0
    ) -> Iterator[OpenTask]:
        """Start an operation called `what`, of which `done` units are already done.

        With a known `total`, the time left is shown.
        """
        with self._lock:
            outermost = not self._open
            task = OpenTask(self.clock, what, total, unit, done)
            self._open.append(task)
            if outermost:
                self._start()
        failed = True
        try:
            yield task
            failed = False
        finally:
            with self._lock:
                if task in self._open:
                    self._open.remove(task)
                empty = not self._open
            if empty:
                self._stop()
            line = task.closing_line()
            if outermost and not failed and line:
                self.say(line)

    def say(self, line: str) -> None:
        """Print one permanent line. A terminal wraps it at spaces."""
        line = printable(without_secrets(line))
        if self._cell is not None:
            self._cell.show(wrapped(line, self.console.width))
            return
        text = wrapped(line, self.console.width) if self.interactive else line
        self.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Remove the lines in progress, for example before an error is printed."""
        with self._lock:
            self._open.clear()
        self._stop()

    def _start(self) -> None:
        if self.interactive:
            self._live = Live(
                console=self.console,
                get_renderable=self.lines,
                transient=True,
                redirect_stdout=False,
                refresh_per_second=REDRAWS_PER_S,
            )
            self._live.start()
            return
        self._all_closed = threading.Event()
        self._last_plain = max(self._last_plain, self.clock() - PLAIN_EVERY_S + 2)
        ticker = threading.Thread(
            target=self._tick, args=(self._all_closed,), name="progress", daemon=True
        )
        ticker.start()  # may fail, and only a thread that runs can be joined
        self._ticker = ticker

    def _stop(self) -> None:
        ticker, self._ticker = self._ticker, None
        live, self._live = self._live, None
        if live:
            with suppress(IndexError):  # a signal came while it started, before rich had its hook
                live.stop()
        if ticker:
            self._all_closed.set()
            ticker.join()
            if self._cell is not None:
                self._cell.show(in_progress="")

    def _tick(self, closed: threading.Event) -> None:
        while not closed.wait(TICK_S):
            if self._cell is None:
                if line := self.plain_line():
                    self.say(line)
                continue
            width = min(self.console.width, CELL_COLUMNS)
            paper = Console(file=io.StringIO(), width=width, force_jupyter=False, color_system=None)
            with paper.capture() as drawn:
                paper.print(self.lines(width))
            self._cell.show(in_progress=drawn.get().rstrip())

    def plain_line(self) -> str | None:
        """Return the line that is due about the innermost operation, None if it is too early."""
        with self._lock:
            now = self.clock()
            if not self._open or now - self._last_plain < PLAIN_EVERY_S:
                return None
            task = self._open[-1]
            since_shown_s = math.inf if task.shown_s is None else now - task.shown_s
            if not task.is_counted and since_shown_s < UNCOUNTED_EVERY_S:
                return None
            self._last_plain = task.shown_s = now
            return f"{task.what}: {' · '.join(task.facts())}"

    def lines(self, width: int | None = None) -> RenderableType:
        """Return the lines of every operation for `width` columns (None: the terminal's).

        It takes no lock, because rich calls it under its own.
        """
        shown = [task for task in tuple(self._open) if task.elapsed >= APPEARS_AFTER_S]
        width, height = width or self.console.width, self.console.height
        return Group(*(task.block(width, height, nested=i > 0) for i, task in enumerate(shown)))
