"""What a person sees: long steps with their rate and time left, a run as it goes, and a loss curve as a small picture.

Everything here goes to standard error; standard output belongs to results. On a terminal a step that takes longer than a
blink has one calm line that is redrawn; elsewhere (a log file, a pipe) it prints plain lines, one every five seconds.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from flatout.progress import Task

APPEARS_AFTER_S = 0.1
PLAIN_EVERY_S = 5.0
REDRAWS_PER_S = 6
RATE_WINDOW_S = 10.0


def duration(seconds: float) -> str:
    """Return a length of time as a person reads it: 0.4 s, 8 s, 1 min 02 s, 2 h 05 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def amount(number: float, unit: str = "") -> str:
    """Return a number with its unit, shortened: 12.3 MB, 61.2 K tokens, 1,234 documents."""
    if unit in {"bytes", "B"}:
        for step, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if number >= step:
                return f"{number / step:.1f} {name}"
        return f"{number:.0f} bytes"
    short = next((f"{number / step:.1f} {name}" for step, name in ((1e9, "G"), (1e6, "M"), (1e4, "K")) if number >= step), None)
    if short and short.endswith("K"):
        short = f"{number / 1e3:.1f} K"
    if short is None:
        short = f"{number:.1f}" if number < 10 and number != int(number) else f"{number:,.0f}"
    return f"{short} {unit}".rstrip()


class _OpenTask:
    """One long step under way, and what a line about it says."""

    def __init__(self, what: str, total: float | None, unit: str, clock: Callable[[], float]) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.done = 0.0
        self.text = ""
        self.clock = clock
        self.started = clock()
        self.marks: deque[tuple[float, float]] = deque([(self.started, 0.0)])

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
        self.text = text

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return self.clock() - self.started

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
        """Return what a line says after the step's name."""
        rate = self.rate()
        found = [f"{self.share:.0%}"] if self.share is not None else []
        if self.text:
            found.append(self.text)
        if rate > 0 and self.unit:
            found.append(f"{amount(rate, self.unit)}/s")
        elif self.total is None or rate == 0:
            found.append(duration(self.elapsed))
        if self.total and rate > 0 and self.done < self.total:
            found.append(f"{duration((self.total - self.done) / rate)} left")
        return found

    def closing_line(self) -> str:
        """Return the line that stays when the step is done."""
        counted = f"{amount(self.done, self.unit)} in " if self.unit and self.done else ""
        return f"{self.what}: {counted}{duration(self.elapsed)}"


class Terminal:
    """The progress of long steps, on a person's terminal or as plain lines in a log. Implements `progress.Progress`."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=False)
        self._clock = clock
        self._lock = threading.RLock()
        self._open: list[_OpenTask] = []
        self._live: Live | None = None
        self._ticker: threading.Thread | None = None
        self._all_closed = threading.Event()
        self._last_plain = -math.inf

    @property
    def interactive(self) -> bool:
        """Whether a person watches: a terminal that can redraw a line."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    @contextmanager
    def task(self, what: str, *, total: float | None = None, unit: str = "") -> Iterator[Task]:
        """Open a step called `what`; `total` units when that can be known, so that time left can be said."""
        task = _OpenTask(what, total, unit, self._clock)
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
            if outermost and not failed and task.elapsed >= 1:
                self.say(task.closing_line())

    def say(self, line: str) -> None:
        """Print one line that stays."""
        self.console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Take away whatever line is still drawn, so that an error can be read."""
        with self._lock:
            self._open.clear()
        self._stop()

    def _start(self) -> None:
        if self.interactive:
            live = Live(get_renderable=self._render, console=self.console, transient=True, redirect_stdout=False, refresh_per_second=REDRAWS_PER_S)
            self._live = live
            live.start()
            return
        self._all_closed = threading.Event()
        self._last_plain = max(self._last_plain, self._clock() - PLAIN_EVERY_S + 2)
        self._ticker = threading.Thread(target=self._tick, args=(self._all_closed,), name="progress", daemon=True)
        self._ticker.start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        ticker, self._ticker = self._ticker, None
        if live:
            live.stop()
        if ticker:
            self._all_closed.set()
            ticker.join()

    def _tick(self, closed: threading.Event) -> None:
        while not closed.wait(0.25):
            line = self.plain_line()
            if line:
                self.say(line)

    def plain_line(self) -> str | None:
        """Return the line that is due about the innermost step, None when it is too early for one."""
        with self._lock:
            now = self._clock()
            if not self._open or now - self._last_plain < PLAIN_EVERY_S:
                return None
            self._last_plain = now
            task = self._open[-1]
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
        cells: list[RenderableType] = [Text(" ") if nested else Spinner("dots", style="cyan"), Text(task.what)]
        if bar >= 6:
            cells.append(ProgressBar(total=1.0, completed=task.share or 0.0, width=bar))
        cells.append(Text(" · ".join(facts), style="dim"))
        row = Table.grid(padding=(0, 1, 0, 0))
        for cell in cells:
            row.add_column(no_wrap=True, overflow="ellipsis", min_width=len(task.what) if cell is cells[1] else None)
        row.add_row(*cells)
        return row


class RunReport:
    """A run as it goes: one calm line for the steps, one that stays for each evaluation, epoch, sample and save.

    Implements the observer of `training/observers.py`.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._context: AbstractContextManager[Task] | None = None
        self._task: Task | None = None
        self._step = 0
        self._epoch = 0
        self._losses: list[float] = []
        self._figures: Mapping[str, float] = {}

    def on_start(self, run: Any) -> None:
        """Take note of where the run begins; the line opens with the first step, when the length is known."""
        self._step = run.step

    def on_tick(self, step: int, last_step: int) -> None:
        """Move the line of the steps on."""
        if self._context is None or self._task is None:
            self._context = self.terminal.task("Training", total=last_step - self._step)
            self._task = self._context.__enter__()
        self._task.advance(step - self._step)
        self._step = step
        self._task.note(" · ".join([f"{step:,}/{last_step:,}", *_step_facts(self._figures)]))

    def on_record(self, record: Mapping[str, float]) -> None:
        """Keep the newest figures for the line; an evaluation and a new epoch leave a line each."""
        self._figures = {**self._figures, **record}
        if "train/loss" in record:
            self._losses.append(record["train/loss"])
        if "val/loss" in record:
            self.terminal.say(f"Step {record['step']:,.0f}: validation loss {record['val/loss']:.4f}")
        epoch = int(record.get("train/epoch", self._epoch))
        if epoch > self._epoch:
            mean = sum(self._losses) / len(self._losses) if self._losses else math.nan
            self.terminal.say(f"Epoch {epoch} done at step {record['step']:,.0f}: mean training loss {mean:.4f}")
            self._epoch, self._losses = epoch, []

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Leave a line for what happened."""
        line = _event_line(event)
        if line:
            self.terminal.say(line)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Close the line of the steps."""
        context, self._context, self._task = self._context, None, None
        if context:
            context.__exit__(None, None, None)


def _event_line(event: Mapping[str, Any]) -> str | None:
    """Return what a person reads about an event; what it says itself, else its kind and its values."""
    for key in ("text", "message", "line"):
        if event.get(key):
            return str(event[key])
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


def curve(
    points: Sequence[tuple[float, float]],
    *,
    marks: Sequence[tuple[float, float]] = (),
    width: int = 60,
    height: int = 8,
    encoding: str = "utf-8",
) -> str:
    """Return a small picture of losses over steps: `points` as a line, `marks` (validation losses) as dots on it.

    Points are (step, loss); what is not finite is left out. Braille characters, or plain ASCII where `encoding` cannot show them.
    """
    line = [(x, y) for x, y in sorted(points) if math.isfinite(y)]
    dots = [(x, y) for x, y in sorted(marks) if math.isfinite(y)]
    if len(line) < 2:
        return ""
    fine = _can_show("⣿│└●", encoding)
    across, down = (2, 4) if fine else (1, 1)
    values = [y for _, y in line + dots]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    first, last = min(line[0][0], dots[0][0] if dots else math.inf), max(line[-1][0], dots[-1][0] if dots else -math.inf)
    columns = _columns(line, first, last, width * across)
    rows = [None if y is None else round((high - y) / span * (height * down - 1)) for y in columns]
    cells = _braille(rows, width, height) if fine else _stars(rows, width, height)
    for x, y in dots:
        column = round((x - first) / ((last - first) or 1) * (width - 1))
        cells[round((high - y) / span * (height - 1))][column] = "●" if fine else "o"
    return _framed(cells, low, high, f"{first:,.0f}", f"{last:,.0f}", bool(dots), fine)


def _can_show(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _columns(line: list[tuple[float, float]], first: float, last: float, count: int) -> list[float | None]:
    """Average the points that fall into each column, and join the columns between by straight lines."""
    sums: list[list[float]] = [[] for _ in range(count)]
    for x, y in line:
        sums[round((x - first) / ((last - first) or 1) * (count - 1))].append(y)
    filled = [(i, sum(ys) / len(ys)) for i, ys in enumerate(sums) if ys]
    columns: list[float | None] = [None] * count
    for (i, y), (j, z) in zip(filled, filled[1:] + filled[-1:], strict=True):
        for k in range(i, j + 1):
            columns[k] = y + (z - y) * (k - i) / ((j - i) or 1)
    return columns


def _strokes(rows: list[int | None]) -> Iterator[tuple[int, int]]:
    """Yield every (column, row) of a line through one row a column, steep parts filled in."""
    before: int | None = None
    for column, row in enumerate(rows):
        if row is None:
            continue
        start = row if before is None else before + (1 if row > before else -1 if row < before else 0)
        step = 1 if row >= start else -1
        for r in range(start, row + step, step):
            yield column, r
        before = row


def _braille(rows: list[int | None], width: int, height: int) -> list[list[str]]:
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    cells = [[0] * width for _ in range(height)]
    for column, row in _strokes(rows):
        cells[row // 4][column // 2] |= bits[row % 4][column % 2]
    return [[chr(0x2800 + cell) if cell else " " for cell in line] for line in cells]


def _stars(rows: list[int | None], width: int, height: int) -> list[list[str]]:
    cells = [[" "] * width for _ in range(height)]
    for column, row in _strokes(rows):
        cells[row][column] = "*"
    return cells


def _framed(cells: list[list[str]], low: float, high: float, first: str, last: str, marked: bool, fine: bool) -> str:
    side, corner, floor, dot = ("│", "└", "─", "●") if fine else ("|", "+", "-", "o")
    height, width = len(cells), len(cells[0])
    lines = []
    for i, row in enumerate(cells):
        label = f"{high - (high - low) * i / (height - 1):8.3f}" if i in {0, height // 2, height - 1} else " " * 8
        lines.append(f"{label} {side}{''.join(row)}".rstrip())
    lines.append(f"{'':8} {corner}{floor * width}")
    title = f"loss over steps ({dot} validation)" if marked else "loss over steps"
    lines.append(f"{'':10}{first}{title:^{max(1, width - len(first) - len(last))}}{last}")
    return "\n".join(lines)
