"""The size of the terminal, and text that is wrapped to it."""

from __future__ import annotations

import os
import re
import sys
import textwrap

DEFAULT_COLUMNS = 80


def columns() -> int:
    """Return the width of the terminal, 80 without one."""
    size = _terminal_size()
    return size.columns if size else DEFAULT_COLUMNS


def rows() -> int | None:
    """Return the number of lines of the terminal, None without one."""
    size = _terminal_size()
    return size.lines if size and size.lines > 0 else None


def _terminal_size() -> os.terminal_size | None:
    for stream in (sys.stdout, sys.stderr):
        try:
            found = os.get_terminal_size(stream.fileno())
        except (OSError, ValueError, AttributeError):
            continue
        if found.columns > 0:
            return found
    return None


def wrapped(text: str, width: int, *, hanging: int | None = None) -> str:
    """Return text with long lines wrapped at spaces; words, such as paths, are never cut.

    Continuation lines are indented to the line's second column, if it has one, or else slightly;
    lines of a block (`  | `) continue with the same prefix.
    """
    return "\n".join(
        _wrapped_line(line, width, hanging) if len(line) > width else line
        for line in text.split("\n")
    )


def _wrapped_line(line: str, width: int, hanging: int | None) -> str:
    if line.startswith("  | "):
        pieces = textwrap.wrap(
            line[4:],
            max(width - 4, 1),
            drop_whitespace=False,
            replace_whitespace=False,
            expand_tabs=False,
        )
        return "\n".join(f"  | {piece}".rstrip() for piece in pieces)
    margin = len(line) - len(line.lstrip(" "))
    first_column = re.match(r" *\S+( \S+)* {2,}", line)
    column = hanging if hanging is not None else first_column.end() if first_column else width
    indent = column if column <= width // 2 else margin + 2
    pieces = textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(pieces)
