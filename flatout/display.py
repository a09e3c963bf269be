"""Numbers with their units as people read them: one function per unit."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = "–"
"""Shown for what was not measured."""


def duration(seconds: float) -> str:
    """Return a duration in readable form: 0.4 s, 8 s, 1 min 02 s, 2 h 05 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def milliseconds(seconds: float) -> str:
    """Return a time with three digits and its unit: 12.3 ms, 1.23 s."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def age(seconds: float) -> str:
    """Return an age in its largest unit: 8 s, 5 min, 23 h, 3 d."""
    units = ((86_400, "d"), (3600, "h"), (60, "min"))
    return next(
        (f"{seconds // length:.0f} {unit}" for length, unit in units if seconds >= length),
        f"{seconds:.0f} s",
    )


def amount(number: float, unit: str = "") -> str:
    """Return a number with its unit in short form: 12.3 MB, 61.2 K tokens, 1,234 documents.

    A unit in the plural loses its `s` after 1.
    """
    if unit in {"bytes", "B"}:
        for step, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if number >= step:
                return f"{number / step:.1f} {name}"
        return f"{number:.0f} bytes"
    for least, step, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "K")):
        if number >= least:
            return f"{number / step:.1f} {name} {unit}".rstrip()
    short = f"{number:.1f}" if number < 10 and number != int(number) else f"{number:,.0f}"
    return f"{short} {unit.removesuffix('s') if short == '1' else unit}".rstrip()


def gib(size: float) -> str:
    """Return memory in GiB, or in MiB where two digits would hide it."""
    return f"{size:.2f} GiB" if size >= 0.1 else f"{1024 * size:.1f} MiB"


def digits(number: float) -> str:
    """Return a number with up to four digits, or all those before the decimal point."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def optional(number: float | None, form: str) -> str:
    """Return a number in a format, or `-` for one that is not known."""
    return "-" if number is None else format(number, form)


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return one line per row, with aligned columns: the first `left` to the left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
