"""A notebook cell: one block of output, updated in place. Used only where IPython is running."""

from __future__ import annotations

import importlib
import threading
from typing import Any

CELL_COLUMNS = 100


class CellBlock:
    """Permanent lines above the operations in progress; each execution has its own block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cell: int | None = None
        self._handle: Any = None
        self._lines: list[str] = []
        self._in_progress = ""
        self._shown = ""

    def say(self, line: str) -> None:
        """Add a permanent line."""
        with self._lock:
            self._start_block()
            self._lines.append(line)
            self._show()

    def draw(self, in_progress: str) -> None:
        """Replace the lines of the operations in progress."""
        with self._lock:
            self._start_block()
            self._in_progress = in_progress
            self._show()

    def _start_block(self) -> None:
        cell = importlib.import_module("IPython").get_ipython().execution_count
        if cell != self._cell:
            self._cell, self._handle, self._lines = cell, None, []
            self._in_progress = self._shown = ""

    def _show(self) -> None:
        text = "\n".join(filter(None, [*self._lines, self._in_progress]))
        if text == self._shown:
            return
        self._shown, bundle = text, {"text/plain": text}
        if self._handle is None:
            self._handle = importlib.import_module("IPython.display").display(
                bundle, raw=True, display_id=True
            )
        else:
            self._handle.update(bundle, raw=True)
