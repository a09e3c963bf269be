"""Fixtures for tests of training; makes the helper modules importable."""

import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from failing_proxy import between  # noqa: F401
from faulty_store import store  # noqa: F401

from flatout.progress import SILENT
from flatout.training.metrics import clocks, log
from flatout.training.metrics.observers import Quiet

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def stop_at():
    """Return an observer class that sends this process SIGINT after a step, as Ctrl+C does."""

    class StopAt(Quiet):
        def __init__(self, step, number=signal.SIGINT):
            self.step, self.number = step, number

        def on_tick(self, step, last_step):
            if step == self.step:
                os.kill(os.getpid(), self.number)

    return StopAt


class Killed(Exception):
    """Simulates a kill: no code handles it."""


@pytest.fixture
def killed_in(monkeypatch):
    """Return a context manager that kills the run when it calls `module.name`."""

    @contextmanager
    def killing(module, name):
        def kill(*_, **__):
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(module, name, kill)
            try:
                yield
            except Killed:
                return
        pytest.fail(f"{name} was not called")

    return killing


@pytest.fixture
def messages():
    """Return a progress that collects its messages in `lines`."""

    class Messages(type(SILENT)):
        def __init__(self):
            self.lines = []

        def say(self, line):
            self.lines.append(line)

    return Messages()


@pytest.fixture
def records():
    """Return a function that reads the records of a run."""
    return lambda run: [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]
    ]


@pytest.fixture
def losses(records):
    """Return a function that reads the metrics of one name from a run, its losses by default."""
    return lambda run, name="train/loss": [line[name] for line in records(run) if name in line]


@pytest.fixture
def events():
    """Return a function that reads the events of one kind of a run."""

    def read(run, kind):
        found = map(json.loads, (run / "events.jsonl").read_text().splitlines())
        return [event for event in found if event["event"] == kind]

    return read


class Clock:
    """A clock that advances only when a test sets `now`."""

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
