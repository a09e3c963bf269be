"""The rate of a finished run is recorded for later plans."""

import pytest

from flatout.assembly.measured import runs_here
from flatout.errors import Stopped
from flatout.hardware.machine import probe
from flatout.training.run import run_training

pytestmark = pytest.mark.slow


@pytest.fixture
def recorded(tmp_path):
    """Return the runs recorded in this test's cache."""
    return lambda: list(runs_here(probe(), "cpu", tmp_path / "cache"))


def test_a_run_is_recorded_with_its_rate(tiny_config, tmp_path, recorded):
    summary = run_training(tiny_config(), tmp_path / "run", cache=tmp_path / "cache")
    assert [run.tokens_per_s for run in recorded()] == [summary["tokens_per_s"]]


def test_a_run_without_a_cache_is_not_recorded(tiny_config, tmp_path, recorded):
    run_training(tiny_config(), tmp_path / "run")
    assert recorded() == []


def test_a_resumed_run_is_not_recorded(tiny_config, tmp_path, stop_at, recorded):
    config, cache = tiny_config(train__steps=20), tmp_path / "cache"
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", cache=cache, observers=[stop_at(4)])
    run_training(config, tmp_path / "run", cache=cache)
    assert recorded() == []
