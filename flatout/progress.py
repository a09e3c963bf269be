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


def counted(number: int, one: str, more: str = "") -> str:
    """Return a number with its noun. `more` is an irregular plural."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"
