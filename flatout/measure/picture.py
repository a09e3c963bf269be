"""A report as a picture: a bar a row, a whisker for its interval, its gain beside it. SVG, written by hand."""

from __future__ import annotations

from html import escape

from flatout.measure.results import Report, Row
from flatout.measure.table import absence, gain_words, groups, setting, title, total_words, unreached

MARGIN, BAR, BESIDE, ROW, HEADING = 24, 400, 396, 26, 40
"""Pixels: the border, the longest bar, the words beside it, the height of a row, of a heading."""
SHORTEST_NAMES, LETTER = 260, 7.3
"""Pixels: the least that the names take, and a letter of one."""
COLOURS = {"baseline": "#9aa4b2", "added": "#2f6fde", "left-out": "#d98324", "put-in": "#3a9d6e", "point": "#2f6fde"}
INK, PALE = "#1d2433", "#667085"
LONGEST_TEXT = 118


def picture(report: Report) -> str:
    """Return the report as SVG."""
    drawn = [(heading, rows) for heading, rows in groups(report) if rows[0].kind != "absent"]
    tops = [row.tokens_per_s.high or row.tokens_per_s.median for _, rows in drawn for row in rows if row.tokens_per_s]
    per_pixel = max(tops, default=1.0) / BAR
    left = MARGIN + round(max([SHORTEST_NAMES, *(LETTER * len(row.short_name) for _, rows in drawn for row in rows)]))
    width = left + BAR + BESIDE
    y = 84.0 if report.total_speedup else 62.0
    parts = [text(MARGIN, 38, title(report), size=20, weight="bold")]
    if report.total_speedup:
        parts.append(text(MARGIN, 62, total_words(report), size=14))
    for heading, rows in drawn:
        if heading:
            parts.append(text(MARGIN, y + 22, heading, size=13, colour=PALE))
            y += HEADING - 8
        for row in rows:
            parts += row_parts(row, y, per_pixel, left)
            y += ROW
        y += 10
    for said in (line for words in unreached(report) for line in broken(words)):
        parts.append(text(MARGIN, y + 16, said, size=12, colour=PALE, style="italic"))
        y += 20
    parts += [text(MARGIN, y + 16 + 15 * number, line, size=10, colour=PALE) for number, line in enumerate(broken(setting(report)))]
    height = y + 34 + 15 * (len(broken(setting(report))) - 1)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" '
        f'font-family="Helvetica, Arial, sans-serif">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height:.0f}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def row_parts(row: Row, y: float, per_pixel: float, left: float) -> list[str]:
    """Return one row's elements: its name up to `left`, its bar with the whisker, its rate and its gain; or why it has none."""
    middle = y + ROW / 2
    name = text(left - 10, middle + 4, row.short_name, size=13, anchor="end")
    if row.tokens_per_s is None:
        return [name, text(left, middle + 4, shortened(absence(row)), size=12, colour=PALE, style="italic")]
    figure = row.tokens_per_s
    length = figure.median / per_pixel
    parts = [name, f'<rect x="{left}" y="{y + 4}" width="{length:.1f}" height="{ROW - 8}" rx="2" fill="{COLOURS[row.kind]}"/>']
    end = length
    if figure.low is not None and figure.high is not None:
        low, end = figure.low / per_pixel, max(figure.high / per_pixel, length)
        parts.append(line(left + low, middle, left + end, middle))
        parts += [line(left + x, middle - 4, left + x, middle + 4) for x in (low, end)]
    told = f"{figure.median:,.0f}"
    gain = gain_words(row)
    parts.append(text(left + end + 8, middle + 4, told + (f"   {gain}" if gain else ""), size=12))
    if row.promise_kept is False:
        parts.append(text(left + 6, middle + 4, "promise broken", size=11, colour="#ffffff", weight="bold"))
    return parts


def text(
    x: float, y: float, words: str, *, size: int, colour: str = INK, anchor: str = "start", weight: str = "normal", style: str = "normal"
) -> str:
    """Return a text element."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}" font-style="{style}" xml:space="preserve">{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a thin line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" stroke-width="1.3"/>'


def shortened(words: str) -> str:
    """Return words that fit beside a name."""
    return words if len(words) <= LONGEST_TEXT else words[: LONGEST_TEXT - 3].rstrip() + "..."


def broken(words: str) -> list[str]:
    """Return words as lines that fit on the page."""
    lines = [""]
    for word in words.split(" "):
        if len(lines[-1]) + len(word) > 1.5 * LONGEST_TEXT:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
