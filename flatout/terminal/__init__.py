"""Terminal output: the progress of long operations and runs, and a small loss curve.

Everything here goes to standard error. Standard output is for results. On a terminal, each
operation has one line that is redrawn. In a log file or a pipe, it prints a plain line every five
seconds.
"""

from __future__ import annotations

from flatout.terminal.closing import closing
from flatout.terminal.lines import Terminal
from flatout.terminal.picture import curve
from flatout.terminal.run import RunReport

__all__ = [
    "RunReport",
    "Terminal",
    "closing",
    "curve",
]
