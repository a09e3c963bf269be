"""Fixtures: a run to log, and an observer that collects its records."""

import pytest

from flatout.training.metrics.observers import Quiet


@pytest.fixture
def start_run(build_run, tiny_config, tmp_path):
    """Return a function that builds a tiny run and creates its run directory."""

    def start(**changes):
        (tmp_path / "run").mkdir()
        return build_run(tiny_config(**changes))

    return start


@pytest.fixture
def collector():
    """Return an observer that collects the run's `records`."""

    class Collector(Quiet):
        def __init__(self):
            self.records = []

        def on_record(self, record):
            self.records.append(record)

    return Collector()
