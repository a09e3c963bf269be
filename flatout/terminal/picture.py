"""A small loss curve made of text characters, for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from flatout.json_io import is_finite
from flatout.streams import can_show

BARS = "▁▂▃▄▅▆▇█"


def curve(
    points: Sequence[tuple[float, float]],
    *,
    marks: Sequence[tuple[float, float]] = (),
    width: int = 60,
    height: int = 8,
    encoding: str = "utf-8",
) -> str:
    """Return losses over steps as text: `points` as a line, `marks` (validation losses) as dots.

    Points are (step, loss); those that are not finite are left out. The curve uses Braille
    characters, or ASCII if `encoding` lacks them.
    """
    line = [(x, y) for x, y in sorted(points) if is_finite(y)]
    dots = [(x, y) for x, y in sorted(marks) if is_finite(y)]
    if len(line) < 2:
        return ""
    fine = can_show("⣿│└●", encoding)
    across, down = (2, 4) if fine else (1, 1)
    values = [y for _, y in line + dots]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    steps = [x for x, _ in line + dots]
    first, last = min(steps), max(steps)
    columns = _columns(line, first, last, width * across)
    rows = [
        None if math.isnan(y) else round((high - y) / span * (height * down - 1)) for y in columns
    ]
    cells = _braille(rows, width, height) if fine else _stars(rows, width, height)
    for x, y in dots:
        column = round((x - first) / ((last - first) or 1) * (width - 1))
        cells[round((high - y) / span * (height - 1))][column] = "●" if fine else "o"
    return _framed(cells, low, high, f"{first:,.0f}", f"{last:,.0f}", bool(dots), fine)


def sparkline(values: Sequence[float], width: int, *, encoding: str = "utf-8") -> str:
    """Return values as one line of at most `width` bars, "" where `encoding` lacks them.

    Each bar is the mean of its share of the values.
    """
    if len(values) < 2 or not can_show(BARS, encoding):
        return ""
    pieces = np.array_split(np.asarray(values, dtype=float), min(width, len(values)))
    means = [float(piece.mean()) for piece in pieces]
    low = min(means)
    span = (max(means) - low) or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


def _columns(line: list[tuple[float, float]], first: float, last: float, count: int) -> list[float]:
    """Return the mean of the points in each column, with straight lines in between, NaN outside."""
    x, y = np.transpose(line)
    column = np.rint((x - first) / ((last - first) or 1) * (count - 1)).astype(int)
    filled, members = np.unique(column, return_counts=True)
    means = np.bincount(column, y)[filled] / members
    values = np.interp(np.arange(count), filled, means, left=math.nan, right=math.nan)
    return list(map(float, values))


def _strokes(rows: list[int | None]) -> Iterator[tuple[int, int]]:
    """Yield every (column, row) of a line with one row per column, steep parts filled in."""
    before: int | None = None
    for column, row in enumerate(rows):
        if row is None:
            continue
        start = row if before is None else before + (row > before) - (row < before)
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


def _framed(
    cells: list[list[str]], low: float, high: float, first: str, last: str, marked: bool, fine: bool
) -> str:
    side, corner, floor, dot = ("│", "└", "─", "●") if fine else ("|", "+", "-", "o")
    height, width = len(cells), len(cells[0])
    lines = []
    for i, row in enumerate(cells):
        label = (
            f"{high - (high - low) * i / (height - 1):8.3f}"
            if i in {0, height // 2, height - 1}
            else " " * 8
        )
        lines.append(f"{label} {side}{''.join(row)}".rstrip())
    lines.append(f"{'':8} {corner}{floor * width}")
    title = _title(width - len(first) - len(last) - 2, dot if marked else "")
    lines.append(f"{'':10}{first}{title:^{max(1, width - len(first) - len(last))}}{last}")
    return "\n".join(lines)


def _title(room: int, dot: str) -> str:
    """Return the longest title that fits."""
    titles = (
        (f"loss over steps ({dot} validation)", f"loss ({dot} validation)", f"loss ({dot})")
        if dot
        else ("loss over steps",)
    )
    return next((title for title in (*titles, "loss") if len(title) <= room), "")
