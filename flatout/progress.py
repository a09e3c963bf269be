"""How a long step says what it is doing. The work calls these; what a person sees is decided above
(`terminal.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One long step under way."""

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more units as done."""

    def note(self, text: str) -> None:
        """Show a few words beside the step, in place of the last ones."""


class Progress(Protocol):
    """Where long steps report. `task` is a context manager, so that a step that fails is closed
    too.
    """

    def task(
        self, what: str, *, total: float | None = None, unit: str = ""
    ) -> AbstractContextManager[Task]:
        """Open a step called `what`; `total` units when that can be known, so that time left can be
        said.
        """

    def say(self, line: str) -> None:
        """Print one line that stays."""


class _SilentTask:
    def advance(self, amount: float = 1) -> None:
        """Count nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""


class _Silent:
    @contextmanager
    def task(self, what: str, *, total: float | None = None, unit: str = "") -> Iterator[Task]:
        """Open a step that nobody sees."""
        yield _SilentTask()

    def say(self, line: str) -> None:
        """Print nothing."""


SILENT: Progress = _Silent()
"""Reports to nobody: the default of every Python call."""


def readable_size(num_bytes: int) -> str:
    """Return a number of bytes in MB or GB, for a message."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
