"""Shows the progress of calls in a notebook's cell."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from rich.console import Console

from flatout.terminal.lines import Terminal
from flatout.terminal.run import RunReport


def shown_in_cell(function: Any) -> Any:
    """Return `function`, wrapped to report to the notebook's cell by default.

    Passing `progress` or `observers` overrides that. Outside a notebook, and if it takes no
    `progress`, the function is returned unchanged.
    """
    if (
        not inspect.isfunction(function)
        or "progress" not in inspect.signature(function).parameters
        or not Console().is_jupyter
    ):
        return function
    takes_observers = "observers" in inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        terminal = Terminal()
        reports = {"progress": terminal} | (
            {"observers": (RunReport(terminal),)} if takes_observers else {}
        )
        try:
            return function(*values, **reports | named)
        finally:
            terminal.close()

    return call
