"""The standard streams: usable when closed or full, and text that fits the terminal behind them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

DEFAULT_COLUMNS = 80


class _LossyStream(io.FileIO):
    """A stream that drops what it cannot write: a full disk or a closed pipe must not end a run."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def printable(text: str) -> str:
    """Return text without the control characters that move the cursor or change the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def shortened(names: Sequence[object], most: int = 5, between: str = ", ") -> str:
    """Return the first of some names, and how many more there are: `a, b, and 35 more`."""
    if len(names) <= most + 1:
        return between.join(map(str, names))
    return between.join([*map(str, names[:most]), f"and {len(names) - most:,} more"])


def can_show(text: str, encoding: str) -> bool:
    """Return whether an encoding can represent a text."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def open_streams() -> None:
    """Open closed standard streams (`2>&-`) on the null device, and make standard error lossy.

    Otherwise the next file that any library opens would get the file descriptor of standard error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        raw = io.BufferedWriter(_LossyStream(2, "w", closefd=False))
        encoding = getattr(sys.stderr, "encoding", "utf-8")
        sys.stderr = io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # models can write any character


def write_output(write: Callable[[], object]) -> bool:
    """Call `write`, flush standard output, and return whether it worked. If not, print why."""
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        drop_output()
        if not isinstance(error, BrokenPipeError):  # `flatout ... | head` closes it on purpose
            why = error.strerror or error
            print(f"The result could not be written to standard output: {why}.", file=sys.stderr)
            return False
    return True


def drop_output() -> None:
    """Send standard output to the null device, so that Python's own flush at exit succeeds."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


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
    """Return text with long lines wrapped at spaces. Words, such as paths, are never cut.

    Continuation lines are indented to the line's second column, if it has one, or else slightly.
    Lines of a block (`  | `) continue with the same prefix.
    """
    return "\n".join(
        _wrapped_line(line, width, hanging) if len(line) > width else line
        for line in text.split("\n")
    )


def _wrapped_line(line: str, width: int, hanging: int | None) -> str:
    import textwrap  # which `flatout --help` does not need

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
