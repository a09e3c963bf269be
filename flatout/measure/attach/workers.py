"""Finds the lines on which the worker processes of a DataLoader spend their time. No torch.

At a signal, a forked worker writes the line on which it is to a file, once Python runs again; the
process that trains reads it at its next look. Workers that are spawned are not seen.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType

from flatout.measure.attach.guard import guarded
from flatout.measure.attach.lines import WAITS, Line, stack_of, user_line

SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9
LOOP = "torch/utils/data/_utils/worker.py"
"""The file of a worker's loop. The frames below it are those of the process that was forked."""


class Workers:
    """Looks at the stacks of processes that are forked from now on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: dict[int, float] = {}
        """The workers that were asked, and when: a long call is one answer for its whole time."""
        if SIGNAL > 9:
            folder.mkdir()
            os.register_at_fork(after_in_child=guarded(self._listen))

    def _listen(self) -> None:
        """Answer from now on, in the process that was forked."""
        path = self._folder / str(os.getpid())
        answers = open(path.with_suffix(".new"), "ab", buffering=0)  # noqa: SIM115

        def answer(_: int, frame: FrameType | None) -> None:
            stack = [*stack_of(frame)]
            own = [*takewhile(lambda line: not line[0].endswith(LOOP), stack)]
            works = 0 < len(own) < len(stack) and not own[0][0].endswith(WAITS)
            file, number = (user_line(own) if works else None) or ("", 0)
            answers.write(f"{number} {file}\n".encode())

        signal.signal(SIGNAL, guarded(answer))
        signal.siginterrupt(SIGNAL, False)
        path.with_suffix(".new").rename(path)  # before, the signal would end this process

    def lines(self, pids: Iterable[int]) -> Iterator[tuple[Line, float]]:
        """Yield the line of each worker that has answered since, and the seconds, and ask again.

        Workers that wait for work have no line.
        """
        for pid in pids:
            now_s = time.perf_counter()
            with suppress(OSError):  # it is no worker of ours, or has ended
                with open(self._folder / str(pid), "r+b") as file:
                    number, _, name = file.readline().decode().strip().partition(" ")
                    file.truncate(0)
                if number or pid not in self._asked:
                    os.kill(pid, SIGNAL)
                    since_s, self._asked[pid] = self._asked.get(pid, now_s), now_s
                    if name:
                        yield (name, int(number)), now_s - since_s
