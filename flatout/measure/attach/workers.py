"""Finds the lines on which the worker processes of a DataLoader spend their time. No torch.

At a signal, Python's fault handler in a forked worker writes its stack to a file, which the process
that trains reads at its next look. Workers that are spawned are not seen.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from flatout.measure.attach.guard import guarded
from flatout.measure.attach.lines import WAITS, Line, stacks_in, user_line

SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9
LOOP = "torch/utils/data/_utils/worker.py"
"""The file of a worker's loop. The frames below it are those of the process that was forked."""


class Workers:
    """Looks at the stacks of processes that are forked from now on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if SIGNAL > 9:
            folder.mkdir()
            os.register_at_fork(after_in_child=guarded(self._listen))

    def _listen(self) -> None:
        file = open(self._folder / str(os.getpid()), "ab", buffering=0)  # noqa: SIM115
        faulthandler.register(SIGNAL, file)

    def lines(self, pids: Iterable[int]) -> Iterator[Line]:
        """Yield the line on which each worker was at the last look, unless it waited for work."""
        for pid in pids:
            with suppress(OSError):  # it is no worker of ours, or has ended
                with open(self._folder / str(pid), "r+b") as file:
                    stacks = stacks_in(file)
                    file.truncate(0)
                os.kill(pid, SIGNAL)
                for stack in stacks.values():
                    own = [*takewhile(lambda line: not line[0].endswith(LOOP), stack)]
                    line = user_line(own) if len(own) < len(stack) else None
                    if line is not None and not own[0][0].endswith(WAITS):
                        yield line
