"""Charts of lines and of bars as SVG, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 380, 60, 40, 20, 50
"""Size and margins of one chart, in pixels."""
BAR = 28
"""Height of a bar and the space below it."""
GREY = "#757b86"
Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Lines and dots of one name."""

    name: str
    colour: str
    lines: Sequence[Sequence[Point]]
    dots: Sequence[Point]
    label: tuple[Point, str] | None = None
    """Where the name stands, and how it is anchored there; None: in the corner."""


def beside(charts: Iterable[str]) -> str:
    """Return charts beside each other as one picture."""
    shown = [f'<g transform="translate({n * WIDTH},0)">{one}</g>' for n, one in enumerate(charts)]
    return _picture(shown, WIDTH * max(1, len(shown)), HEIGHT)


def below(charts: Sequence[str], height: int) -> str:
    """Return charts of a height below each other as one picture, which a narrow page can show."""
    shown = [f'<g transform="translate(0,{n * height})">{one}</g>' for n, one in enumerate(charts)]
    return _picture(shown, WIDTH, height * len(shown))


def _picture(shown: Sequence[str], width: int, height: int) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12">'
    )
    return "\n".join([opening, *shown, "</svg>"]) + "\n"


def chart(
    title: str,
    caption: str,
    curves: Sequence[Curve],
    *,
    across: Mapping[float, str],
    down: Mapping[float, str],
    dashed: tuple[float, str] | None = None,
    crosses: Sequence[Point] = (),
) -> str:
    """Return a chart with a title above and a caption below.

    `across` and `down` are the labels of the grid by their values, which with the dots span the
    chart; `dashed` is the height and the colour of a line, `crosses` are targets.
    """
    points = [*(dot for curve in curves for dot in curve.dots), *crosses]
    columns = [*across, *(x for x, _ in points)]
    heights = [*down, *(y for _, y in points)]

    def x_of(value: float) -> float:
        share = (value - min(columns)) / ((max(columns) - min(columns)) or 1)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y_of(value: float) -> float:
        share = (max(heights) - value) / ((max(heights) - min(heights)) or 1)
        return round(TOP + share * (HEIGHT - TOP - BOTTOM), 1)

    def text(x: float, y: float, shown: str, anchor: str, colour: str = GREY) -> str:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        return f'<text {place} fill="{colour}">{shown}</text>'

    def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
        return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {style}/>'

    grid = f'stroke="{GREY}" stroke-opacity="0.3"'
    drawn = [text(WIDTH / 2, 20, title, "middle"), text(WIDTH / 2, HEIGHT - 10, caption, "middle")]
    for value, label in across.items():
        drawn.append(line(x_of(value), TOP, x_of(value), HEIGHT - BOTTOM, grid))
        drawn.append(text(x_of(value), HEIGHT - BOTTOM + 18, label, "middle"))
    for value, label in down.items():
        drawn.append(line(LEFT, y_of(value), WIDTH - RIGHT, y_of(value), grid))
        drawn.append(text(LEFT - 8, y_of(value) + 4, label, "end"))
    if dashed is not None:
        style = f'stroke="{dashed[1]}" stroke-dasharray="5 4"'
        drawn.append(line(LEFT, y_of(dashed[0]), WIDTH - RIGHT, y_of(dashed[0]), style))
    for number, curve in enumerate(curves, 1):
        for one in curve.lines:
            path = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in one)
            style = f'fill="none" stroke="{curve.colour}" stroke-width="1.5"'
            drawn.append(f'<polyline points="{path}" {style}/>')
        for x, y in curve.dots:
            place = f'cx="{x_of(x)}" cy="{y_of(y)}" r="2.5"'
            drawn.append(f'<circle {place} fill="{curve.colour}" fill-opacity="0.7"/>')
        place, anchor = (WIDTH - RIGHT - 8.0, TOP + 16.0 * number), "end"
        if curve.label is not None:
            place, anchor = (x_of(curve.label[0][0]), y_of(curve.label[0][1])), curve.label[1]
        drawn.append(text(*place, curve.name, anchor, curve.colour))
    for x, y in crosses:
        cross = f"M{x_of(x) - 6},{y_of(y)} h12 M{x_of(x)},{y_of(y) - 6} v12"
        drawn.append(f'<path d="{cross}" stroke="#dc3c3c" stroke-width="2"/>')
    return "\n".join(drawn)


def bars(title: str, rows: Mapping[str, float], colours: Sequence[str]) -> str:
    """Return horizontal bars with their names at the left and their values beside them."""
    start, full = 2.5 * LEFT, WIDTH - 3.5 * LEFT - RIGHT
    drawn = [f'<text x="{start}" y="20" fill="{GREY}">{title}</text>']
    for number, ((name, value), colour) in enumerate(zip(rows.items(), colours, strict=True)):
        top, length = TOP + BAR * number, max(round(full * value / max(rows.values()), 1), 1)
        drawn += [
            f'<text x="{start - 8}" y="{top + 14}" text-anchor="end" fill="{GREY}">{name}</text>',
            f'<rect x="{start}" y="{top}" width="{length}" height="{BAR - 8}" fill="{colour}"/>',
            f'<text x="{start + length + 8}" y="{top + 14}" fill="{GREY}">{value:,.0f}</text>',
        ]
    return "\n".join(drawn)
