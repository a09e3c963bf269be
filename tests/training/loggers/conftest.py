"""Fixtures for tests of loggers."""

import os
import signal

import pytest

from flatout.training.metrics.observers import Quiet


@pytest.fixture
def stop_after():
    """Return an observer class that asks the run to stop after a step, as Ctrl+C does."""

    class StopAfter(Quiet):
        def __init__(self, step):
            self.step = step

        def on_tick(self, step, last_step):
            if step == self.step:
                os.kill(os.getpid(), signal.SIGINT)

    return StopAfter
