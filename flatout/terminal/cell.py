"""A notebook's cell: one block of output, rewritten in place. IPython is there wherever this is
used; nothing else needs it.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

CELL_COLUMNS = 100


class CellBlock:
    """Lines that stay, and below them the steps under way. Another cell, or the same one run again,
    begins another block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cell: int | None = None
        self._handle: Any = None
        self._lines: list[str] = []
        self._under_way = ""
        self._shown = ""

    def say(self, line: str) -> None:
        """Add a line that stays."""
        with self._lock:
            self._begin_cell()
            self._lines.append(line)
            self._show()

    def draw(self, under_way: str) -> None:
        """Replace what is shown of the steps under way."""
        with self._lock:
            self._begin_cell()
            self._under_way = under_way
            self._show()

    def _begin_cell(self) -> None:
        cell = importlib.import_module("IPython").get_ipython().execution_count
        if cell != self._cell:
            self._cell, self._handle, self._lines, self._under_way, self._shown = (
                cell,
                None,
                [],
                "",
                "",
            )

    def _show(self) -> None:
        text = "\n".join(filter(None, [*self._lines, self._under_way]))
        if text == self._shown:
            return
        self._shown, bundle = text, {"text/plain": text}
        if self._handle is None:
            self._handle = importlib.import_module("IPython.display").display(
                bundle, raw=True, display_id=True
            )
        else:
            self._handle.update(bundle, raw=True)
