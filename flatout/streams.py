"""The standard streams: usable when one of them is closed, full, or has lost its reader."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any


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
    """Call `write` and flush standard output; return whether it worked, and print why if not."""
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
