"""Draws a report: one bar per row with its interval, and its rate and gain beside it.

matplotlib writes SVG that is identical for equal reports. The background is transparent, and every
colour has enough contrast on light and on dark pages.
"""

from __future__ import annotations

import importlib
import io
import textwrap
from typing import TYPE_CHECKING

from flatout.measure.bench.table import (
    absence,
    gain_text,
    groups,
    setting,
    title,
    total_text,
    unreached,
)
from flatout.measure.trials.results import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "baseline": "#9aa4b2",
    "added": "#2f6fde",
    "left-out": "#d98324",
    "put-in": "#3a9d6e",
    "point": "#2f6fde",
}
INK = "#757b86"
"""Colour of all text: about 4.2:1 on white and on #0d1117, the page of GitHub's dark mode."""
BROKEN = "#dc3c3c"
BAR_OPACITY = 0.5
"""Bars are translucent, so that the interval on top of them, in the full colour, is visible."""
STYLE = {
    "svg.hashsalt": "flatout",  # otherwise element names are random
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,
    "text.color": INK,
}
WIDTH, ROW, TOP = 11.0, 0.26, 0.6
"""Inches: the picture, a row, and the space for the titles."""
BAR_SHARE = 2.1
"""Width of the axes in units of the longest bar; text needs the rest."""
COLUMNS, REASON_COLUMNS = 150, 90
"""Characters in a line of the footnote, and of a reason."""


def picture(report: Report) -> str:
    """Return the report as SVG."""
    matplotlib = importlib.import_module("matplotlib")
    figure_module = importlib.import_module("matplotlib.figure")
    drawn = [(heading, rows) for heading, rows in groups(report) if rows[0].kind != "absent"]
    notes = [
        line
        for text in (*unreached(report), setting(report))
        for line in textwrap.wrap(text, COLUMNS, break_on_hyphens=False)
    ]
    num_lines = sum(len(rows) + bool(heading) for heading, rows in drawn)
    height = TOP + ROW * (num_lines + 0.6 * len(notes) + 1)
    with matplotlib.rc_context(STYLE):
        figure = figure_module.Figure(figsize=(WIDTH, height), facecolor="none")
        axes = figure.add_axes((0.3, 0, 0.69, 1 - TOP / height))
        figure.text(0.02, 1 - 0.22 / height, _short(title(report), 80), size=14, weight="bold")
        figure.text(0.02, 1 - 0.45 / height, _short(total_text(report), COLUMNS), size=10)
        position = _draw_groups(axes, drawn)
        for number, line in enumerate(notes):
            axes.text(
                -0.41,
                position + 1.3 + 0.6 * number,
                line,
                size=7,
                va="center",
                transform=axes.get_yaxis_transform(),
            )
        axes.set_ylim(num_lines + 0.6 * len(notes) + 0.8, -0.5)
        page = io.StringIO()
        figure.savefig(
            page, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.2
        )
    return page.getvalue()


def _draw_groups(axes: Axes, drawn: list[tuple[str, list[Row]]]) -> int:
    """Draw the rows of each group below its heading, and return the last position."""
    axes.axis("off")
    rates = [row.tokens_per_s for _, rows in drawn for row in rows if row.tokens_per_s]
    longest = max((rate.high or rate.median for rate in rates), default=1.0)
    axes.set_xlim(0, BAR_SHARE * longest)
    position = -1
    for heading, rows in drawn:
        if heading:
            position += 1
            axes.text(0, position, heading, weight="bold", va="center")
        for row in rows:
            position += 1
            _draw_row(axes, row, position, longest)
    return position


def _draw_row(axes: Axes, row: Row, position: int, longest: float) -> None:
    """Draw a row's name and bar with its figures, or the reason why it has none."""
    gap = 0.01 * longest
    axes.text(-gap, position, row.short_name, ha="right", va="center")
    if row.tokens_per_s is None:
        reason = _short(absence(row), REASON_COLUMNS)
        axes.text(gap, position, reason, style="italic", va="center", size=8)
        return
    rate = row.tokens_per_s
    colour = COLOURS[row.kind]
    axes.barh(position, rate.median, height=0.7, color=colour, alpha=BAR_OPACITY)
    end = rate.median
    if rate.low is not None and rate.high is not None:
        end = max(rate.high, end)
        axes.errorbar(
            rate.median,
            position,
            xerr=[[max(rate.median - rate.low, 0)], [max(rate.high - rate.median, 0)]],
            color=colour,
            capsize=2.5,
            linewidth=1.4,
        )
    figures = " · ".join(filter(None, [f"{rate.median:,.0f}", gain_text(row)]))
    axes.text(end + gap, position, figures, va="center", size=8)
    if row.promise_kept is False:
        axes.text(gap, position, "promise broken", color=BROKEN, weight="bold", va="center")


def _short(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 3].rstrip() + "..."
