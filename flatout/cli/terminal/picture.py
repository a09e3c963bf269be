"""A small loss curve made of text characters, for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flatout.storage.json_io import is_finite
from flatout.storage.streams import can_show

BARS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a Braille character by row and column."""


def curve(
    points: Sequence[tuple[float, float]],
    *,
    marks: Sequence[tuple[float, float]] = (),
    width: int = 60,
    height: int = 8,
    encoding: str = "utf-8",
) -> str:
    """Return losses over steps as text: `points` as a line, `marks` (validation losses) as dots.

    Points are (step, loss). Those that are not finite are omitted. The curve uses Braille
    characters, or ASCII if `encoding` lacks them.
    """
    line = [(x, y) for x, y in sorted(points) if is_finite(y)]
    dots = [(x, y) for x, y in sorted(marks) if is_finite(y)]
    if len(line) < 2:
        return ""
    fine = can_show("⣿│└●", encoding)
    across, down = (2, 4) if fine else (1, 1)
    steps, values = zip(*line, *dots, strict=True)
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    length, span = (last - first) or 1, (high - low) or 1.0
    columns = _columns(line, first, length, width * across)
    rows = [(high - y) / span * (height * down - 1) for y in columns]
    bits = [[0] * width for _ in range(height)]
    for column, row in _strokes(rows):
        bits[row // down][column // across] |= DOTS[row % down][column % across]
    cells = [[(chr(0x2800 + one) if fine else "*") if one else " " for one in row] for row in bits]
    side, corner, floor, dot = ("│", "└", "─", "●") if fine else ("|", "+", "-", "o")
    for x, y in dots:
        column = round((x - first) / length * (width - 1))
        cells[round((high - y) / span * (height - 1))][column] = dot
    labels = {i: high - (high - low) * i / (height - 1) for i in (0, height // 2, height - 1)}
    lines = [
        f"{f'{labels[i]:8.3f}' if i in labels else '':8} {side}{''.join(row)}".rstrip()
        for i, row in enumerate(cells)
    ]
    ends = f"{first:,.0f}", f"{last:,.0f}"
    room = width - sum(map(len, ends))
    names = ("loss over steps ({} validation)", "loss ({} validation)", "loss ({})", "loss")
    titles = [name.format(dot) for name in names] if dots else ["loss over steps", "loss"]
    title = next((title for title in titles if len(title) <= room - 2), "")
    axis = f"{'':8} {corner}{floor * width}"
    return "\n".join([*lines, axis, f"{'':10}{ends[0]}{title:^{max(1, room)}}{ends[1]}"])


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


def _columns(line: list[tuple[float, float]], first: float, length: float, count: int) -> Any:
    """Return the mean of the points in each column, with straight lines in between, NaN outside."""
    x, y = np.transpose(line)
    column = np.rint((x - first) / length * (count - 1)).astype(int)
    filled, members = np.unique(column, return_counts=True)
    means = np.bincount(column, y)[filled] / members
    return np.interp(np.arange(count), filled, means, left=math.nan, right=math.nan)


def _strokes(rows: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield every (column, row) of a line with one row per column, steep parts filled in."""
    before: int | None = None
    for column, at in enumerate(rows):
        if math.isnan(at):
            continue
        row = round(at)
        start = row if before is None else before + (row > before) - (row < before)
        step = 1 if row >= start else -1
        for r in range(start, row + step, step):
            yield column, r
        before = row
