"""What a person sees: long steps with their rate and time left, a run as it goes, and a loss curve
as a small picture.

Everything here goes to standard error; standard output belongs to results. On a terminal a step
that takes longer than a blink has one calm line that is redrawn; elsewhere (a log file, a pipe) it
prints plain lines, one every five seconds.
"""

from __future__ import annotations

from flatout.terminal.figures import amount, columns, duration, printable, wrapped
from flatout.terminal.lines import Terminal
from flatout.terminal.picture import curve
from flatout.terminal.report import RunReport, closing

__all__ = [
    "RunReport",
    "Terminal",
    "amount",
    "closing",
    "columns",
    "curve",
    "duration",
    "printable",
    "wrapped",
]
