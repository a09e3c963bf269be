"""What a call shows in a notebook when it is not told where to: its progress, and its run as it
goes.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from rich.console import Console

from flatout.terminal.lines import Terminal
from flatout.terminal.report import RunReport


def shown_in_cell(function: Any) -> Any:
    """Return `function` as it is called in a notebook: it reports to the cell unless it is given
    `progress` or `observers`.

    Outside of a notebook, and where it takes no `progress`, it is returned as it is.
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
