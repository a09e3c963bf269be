"""Long steps on a person's terminal, in a notebook's cell, or as plain lines in a log."""

from __future__ import annotations

import io
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from flatout.errors import without_secrets
from flatout.progress import Task
from flatout.terminal.cell import CELL_COLUMNS, CellBlock
from flatout.terminal.figures import amount, duration, printable, wrapped

APPEARS_AFTER_S = 0.1
PLAIN_EVERY_S = 5.0
UNCOUNTED_EVERY_S = 15.0
"""Between two lines of a log about a step that counts nothing."""
CELL_EVERY_S = 0.25
REDRAWS_PER_S = 6
RATE_WINDOW_S = 10.0


class _OpenTask:
    """One long step under way, and what a line about it says."""

    def __init__(
        self, what: str, total: float | None, unit: str, done: float, clock: Callable[[], float]
    ) -> None:
        self.what = without_secrets(what)
        self.total = total
        self.unit = unit
        self.done = self.done_before = done
        self.said_s: float | None = None
        """When a log last had a line about it."""
        self.text = ""
        self.clock = clock
        self.started = clock()
        self.marks: deque[tuple[float, float]] = deque([(self.started, done)])

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more units as done."""
        self.done += amount
        now = self.clock()
        if now - self.marks[-1][0] >= 0.5:
            self.marks.append((now, self.done))
            while len(self.marks) > 2 and now - self.marks[1][0] > RATE_WINDOW_S:
                self.marks.popleft()

    def note(self, text: str) -> None:
        """Show a few words beside the step, in place of the last ones."""
        self.text = without_secrets(text)

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return self.clock() - self.started

    @property
    def is_counted(self) -> bool:
        """Whether a later line about it says more than the time that has passed."""
        return bool(self.total or self.unit)

    @property
    def share(self) -> float | None:
        """What part is done, when the total is known."""
        return min(1.0, self.done / self.total) if self.total else None

    def rate(self) -> float:
        """Return units a second over the last ten seconds, 0 when that cannot be said yet."""
        then, done_then = self.marks[0]
        seconds = self.clock() - then
        return (self.done - done_then) / seconds if seconds > 0.3 else 0.0

    def facts(self) -> list[str]:
        """Return what a line says after the step's name; without a unit, the rate and the time left
        are for its own words to say.
        """
        rate = self.rate() if self.unit else 0.0
        found = [f"{self.share:.0%}"] if self.share is not None else []
        if self.text:
            found.append(self.text)
        if rate > 0:
            found.append(f"{amount(rate, self.unit)}/s")
        elif self.unit or not self.total or self.done == self.done_before:
            found.append(duration(self.elapsed))
        if self.total and rate > 0 and self.done < self.total:
            found.append(f"{duration((self.total - self.done) / rate)} left")
        return found

    def closing_line(self) -> str:
        """Return the line that stays when the step is done."""
        counted = f"{amount(self.done, self.unit)} in " if self.unit and self.done else ""
        return f"{self.what}: {counted}{duration(self.elapsed)}"


class Terminal:
    """The progress of long steps, on a person's terminal, in a notebook's cell or as plain lines in
    a log. Implements `progress.Progress`.
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=False)
        self.clock = clock
        self._lock = threading.RLock()
        self._open: list[_OpenTask] = []
        self._live: Live | None = None
        self._ticker: threading.Thread | None = None
        self._all_closed = threading.Event()
        self._last_plain = -math.inf
        self._cell = CellBlock() if self.console.is_jupyter else None

    @property
    def interactive(self) -> bool:
        """Whether a person watches: a terminal that can redraw a line."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    @property
    def is_cell(self) -> bool:
        """Whether it writes into the cell of a notebook."""
        return self._cell is not None

    @contextmanager
    def task(
        self, what: str, *, total: float | None = None, unit: str = "", done: float = 0.0
    ) -> Iterator[Task]:
        """Open a step called `what`; `total` units when that can be known, so that time left can be
        said; `done` of them were done before.
        """
        task = _OpenTask(what, total, unit, done, self.clock)
        with self._lock:
            outermost = not self._open
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
            is_said = (
                task.said_s is not None and not task.is_counted and task.elapsed < UNCOUNTED_EVERY_S
            )
            if outermost and not failed and task.elapsed >= 1 and not is_said:
                self.say(task.closing_line())

    def say(self, line: str) -> None:
        """Print one line that stays; a person's terminal breaks it at spaces."""
        line = printable(without_secrets(line))
        if self._cell is not None:
            self._cell.say(wrapped(line, self.console.width))
            return
        self.console.print(
            Text(wrapped(line, self.console.width) if self.interactive else line), soft_wrap=True
        )

    def close(self) -> None:
        """Take away whatever line is still drawn, so that an error can be read."""
        with self._lock:
            self._open.clear()
        self._stop()

    def _start(self) -> None:
        if self.interactive:
            live = Live(
                get_renderable=self._render,
                console=self.console,
                transient=True,
                redirect_stdout=False,
                refresh_per_second=REDRAWS_PER_S,
            )
            self._live = live
            live.start()
            return
        self._all_closed = threading.Event()
        self._last_plain = max(self._last_plain, self.clock() - PLAIN_EVERY_S + 2)
        tick = self._tick if self._cell is None else self._redraw_cell
        self._ticker = threading.Thread(
            target=tick, args=(self._all_closed,), name="progress", daemon=True
        )
        self._ticker.start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        ticker, self._ticker = self._ticker, None
        if live:
            live.stop()
        if ticker:
            self._all_closed.set()
            ticker.join()
            if self._cell is not None:
                self._cell.draw("")

    def _tick(self, closed: threading.Event) -> None:
        while not closed.wait(0.25):
            line = self.plain_line()
            if line:
                self.say(line)

    def _redraw_cell(self, closed: threading.Event) -> None:
        assert self._cell is not None, "only a notebook has cells"
        while not closed.wait(CELL_EVERY_S):
            paper = Console(
                file=io.StringIO(),
                width=min(self.console.width, CELL_COLUMNS),
                force_jupyter=False,
                color_system=None,
            )
            with paper.capture() as drawn:
                paper.print(self._render())
            self._cell.draw(drawn.get().rstrip())

    def plain_line(self) -> str | None:
        """Return the line that is due about the innermost step, None when it is too early for one."""
        with self._lock:
            now = self.clock()
            if not self._open or now - self._last_plain < PLAIN_EVERY_S:
                return None
            task = self._open[-1]
            if (
                not task.is_counted
                and task.said_s is not None
                and now - task.said_s < UNCOUNTED_EVERY_S
            ):
                return None
            self._last_plain = task.said_s = now
            return f"{task.what}: {' · '.join(task.facts())}"

    def _render(self) -> RenderableType:
        with self._lock:
            shown = [task for task in self._open if task.elapsed >= APPEARS_AFTER_S]
        return Group(*(self._line(task, nested=i > 0) for i, task in enumerate(shown)))

    def _line(self, task: _OpenTask, *, nested: bool) -> RenderableType:
        """Fit a step on one line: the bar gives way first, then the percentage."""
        facts = task.facts()
        room = self.console.width - len(task.what) - 4
        if task.text and len(" · ".join(facts)) > room:
            facts = [fact for fact in facts if not fact.endswith("%") or " " in fact]
        bar = min(24, room - len(" · ".join(facts)) - 1) if task.share is not None else 0
        cells: list[RenderableType] = [
            Text(" ") if nested else Spinner("dots", style="cyan"),
            Text(task.what),
        ]
        if bar >= 6:
            cells.append(ProgressBar(total=1.0, completed=task.share or 0.0, width=bar))
        cells.append(Text(" · ".join(facts), style="dim"))
        row = Table.grid(padding=(0, 1, 0, 0))
        for cell in cells:
            row.add_column(
                no_wrap=True,
                overflow="ellipsis",
                min_width=len(task.what) if cell is cells[1] else None,
            )
        row.add_row(*cells)
        return row
