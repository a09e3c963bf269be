"""Fixtures for tests of training; puts their helper modules on the path, for child processes too."""

import os
import signal
import sys
from pathlib import Path

import pytest

from flatout.training.metrics import clocks, log
from flatout.training.metrics.observers import Quiet

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def stop_at():
    """Return an observer class that interrupts this process after a step, as Ctrl+C does."""

    class StopAt(Quiet):
        def __init__(self, step):
            self.step = step

        def on_tick(self, step, last_step):
            if step == self.step:
                os.kill(os.getpid(), signal.SIGINT)

    return StopAt


class Clock:
    """A clock that only advances when a test sets `now`."""

    now = 100.0

    def perf_counter(self):
        return self.now

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    monkeypatch.setattr(clocks, "time", clock)
    return clock
