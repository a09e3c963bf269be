"""The interface by which long operations report. `terminal` decides what is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One long operation in progress."""

    def advance(self, amount: float = 1) -> None:
        """Add `amount` units to those done."""

    def note(self, text: str) -> None:
        """Show a short text beside the operation, replacing the previous one."""


class Progress(Protocol):
    """Where long operations report.

    `task` is a context manager, so that a failed operation is closed too.
    """

    def task(
        self, what: str, *, total: float | None = None, unit: str = ""
    ) -> AbstractContextManager[Task]:
        """Start an operation called `what`. With a known `total`, the time left is shown."""

    def say(self, line: str) -> None:
        """Print one permanent line."""


class _SilentTask:
    def advance(self, amount: float = 1) -> None:
        """Count nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""


class _Silent:
    @contextmanager
    def task(self, what: str, *, total: float | None = None, unit: str = "") -> Iterator[Task]:
        """Start an operation that is not shown."""
        yield _SilentTask()

    def say(self, line: str) -> None:
        """Print nothing."""


SILENT: Progress = _Silent()
"""Reports nothing: the default of every Python call."""


def readable_size(num_bytes: int) -> str:
    """Return a number of bytes in MB or GB, for a message."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def readable_memory(num_bytes: float) -> str:
    """Return a number of bytes in GiB, MiB or KiB, in the largest unit that gives at least 0.1."""
    sizes = ((num_bytes / 2**power, unit) for power, unit in ((30, "GiB"), (20, "MiB")))
    size, unit = next((one for one in sizes if one[0] >= 0.1), (num_bytes / 2**10, "KiB"))
    return f"{size:,.1f} {unit}"


def counted(number: int, one: str, more: str = "") -> str:
    """Return a number with its noun. `more` is an irregular plural."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"
