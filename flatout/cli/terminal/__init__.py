"""Terminal output: the progress of long operations and runs.

Everything here goes to standard error. Standard output is for results. On a terminal, each
operation has one line that is redrawn. In a log file or a pipe, it prints a plain line every five
seconds.
"""

from __future__ import annotations

from flatout.cli.terminal.lines import Terminal
from flatout.cli.terminal.panel import RunReport

__all__ = [
    "RunReport",
    "Terminal",
]
