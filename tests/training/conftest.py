"""Makes the stand-in run importable, in spawned processes too."""

import os
import signal
import sys
from pathlib import Path

import pytest

from flatout.training.metrics.observers import Quiet

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def stop_at():
    """Return an observer that asks this process to stop after a step, as Ctrl+C would."""

    class StopAt(Quiet):
        def __init__(self, step):
            self.step = step

        def on_tick(self, step, last_step):
            if step == self.step:
                os.kill(os.getpid(), signal.SIGINT)

    return StopAt


class Clock:
    """A clock that goes only when it is told to."""

    now = 100.0

    def perf_counter(self):
        return self.now

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("flatout.training.metrics.log.time", clock)
    monkeypatch.setattr("flatout.training.metrics.clocks.time", clock)
    return clock
