"""A report as a picture: a bar a row, a whisker for its interval, its gain beside it. SVG, written
by hand.
"""

from __future__ import annotations

import textwrap
from html import escape

from flatout.measure.results import Report, Row
from flatout.measure.table import (
    absence,
    gain_words,
    groups,
    setting,
    title,
    total_words,
    unreached,
)

MARGIN, BAR, BESIDE, ROW, HEADING = 24, 400, 396, 26, 40
"""Pixels: the border, the longest bar, the least that the words beside it take, the height of a
row, of a heading.
"""
SHORTEST_NAMES = 260
"""Pixels: the least that the names take."""
LETTER_EM = 0.66
"""Width of a letter, in font sizes: the mean of the widest of the usual fonts, DejaVu Sans Bold,
since the reader's is unknown.
"""
COLOURS = {
    "baseline": "#9aa4b2",
    "added": "#2f6fde",
    "left-out": "#d98324",
    "put-in": "#3a9d6e",
    "point": "#2f6fde",
}
INK, PALE = "#1d2433", "#667085"


def picture(report: Report) -> str:
    """Return the report as SVG."""
    drawn = [(heading, rows) for heading, rows in groups(report) if rows[0].kind != "absent"]
    tops = [
        row.tokens_per_s.high or row.tokens_per_s.median
        for _, rows in drawn
        for row in rows
        if row.tokens_per_s
    ]
    per_pixel = max(tops, default=1.0) / BAR
    every = [row for _, rows in drawn for row in rows]
    left = MARGIN + round(
        max([SHORTEST_NAMES, *(10 + extent(row.short_name, 13) for row in every)])
    )
    width = left + BAR + round(max([BESIDE, *(8 + extent(figures(row), 12) for row in every)]))
    room = width - 2 * MARGIN
    y = 84.0 if report.total_speedup else 62.0
    parts = [text(MARGIN, 38, shortened(title(report), 20, room), size=20, weight="bold")]
    if report.total_speedup:
        parts.append(text(MARGIN, 62, shortened(total_words(report), 14, room), size=14))
    for heading, rows in drawn:
        if heading:
            parts.append(text(MARGIN, y + 22, heading, size=13, colour=PALE))
            y += HEADING - 8
        for row in rows:
            parts += row_parts(row, y, per_pixel, left, width - left)
            y += ROW
        y += 10
    for said in (line for words in unreached(report) for line in broken(words, 12, room)):
        parts.append(text(MARGIN, y + 16, said, size=12, colour=PALE, style="italic"))
        y += 20
    footnote = broken(setting(report), 10, room)
    parts += [
        text(MARGIN, y + 16 + 15 * number, line, size=10, colour=PALE)
        for number, line in enumerate(footnote)
    ]
    height = y + 34 + 15 * (len(footnote) - 1)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" '
        f'font-family="Helvetica, Arial, sans-serif">'
    )
    return (
        "\n".join(
            [
                head,
                f'<rect width="{width}" height="{height:.0f}" fill="#ffffff"/>',
                *parts,
                "</svg>",
            ]
        )
        + "\n"
    )


def row_parts(row: Row, y: float, per_pixel: float, left: float, room: float) -> list[str]:
    """Return one row's elements: its name up to `left`, its bar with the whisker, its rate and its
    gain; or, in `room`, why it has none.
    """
    middle = y + ROW / 2
    name = text(left - 10, middle + 4, row.short_name, size=13, anchor="end")
    if row.tokens_per_s is None:
        return [
            name,
            text(
                left,
                middle + 4,
                shortened(absence(row), 12, room),
                size=12,
                colour=PALE,
                style="italic",
            ),
        ]
    figure = row.tokens_per_s
    length = figure.median / per_pixel
    parts = [
        name,
        f'<rect x="{left}" y="{y + 4}" width="{length:.1f}" height="{ROW - 8}" rx="2" fill="{COLOURS[row.kind]}"/>',
    ]
    end = length
    if figure.low is not None and figure.high is not None:
        low, end = figure.low / per_pixel, max(figure.high / per_pixel, length)
        parts.append(line(left + low, middle, left + end, middle))
        parts += [line(left + x, middle - 4, left + x, middle + 4) for x in (low, end)]
    parts.append(text(left + end + 8, middle + 4, figures(row), size=12))
    if row.promise_kept is False:
        parts.append(
            text(left + 6, middle + 4, "promise broken", size=11, colour="#ffffff", weight="bold")
        )
    return parts


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int,
    colour: str = INK,
    anchor: str = "start",
    weight: str = "normal",
    style: str = "normal",
) -> str:
    """Return a text element."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}" font-style="{style}" xml:space="preserve">{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a thin line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" stroke-width="1.3"/>'


def figures(row: Row) -> str:
    """Return what stands beside a row's bar: its rate and its gain; nothing where it has none."""
    if row.tokens_per_s is None:
        return ""
    gain = gain_words(row)
    return f"{row.tokens_per_s.median:,.0f}" + (f"   {gain}" if gain else "")


def extent(words: str, size: int) -> float:
    """Return the pixels that words of a font size take at most, in any usual font."""
    return LETTER_EM * size * len(words)


def shortened(words: str, size: int, room: float) -> str:
    """Return words cut to what fits into `room` pixels."""
    most = int(room / extent(" ", size))
    return words if len(words) <= most else words[: most - 3].rstrip() + "..."


def broken(words: str, size: int, room: float) -> list[str]:
    """Return words as lines that fit into `room` pixels."""
    return textwrap.wrap(words, int(room / extent(" ", size)), break_on_hyphens=False) or [""]
