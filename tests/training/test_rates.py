"""The rate of a finished run is recorded for later plans."""

import pytest

from flatout.assembly.measured import EVALUATION_COST, runs_here
from flatout.data.store.shards import Dataset
from flatout.errors import Stopped
from flatout.hardware.machine import probe
from flatout.training import loop
from flatout.training.evaluation import Evaluation, SplitScore
from flatout.training.run import run_training

pytestmark = pytest.mark.slow


@pytest.fixture
def recorded(tmp_path):
    """Return the runs recorded in this test's cache."""
    return lambda: list(runs_here(probe(), "cpu", tmp_path / "cache"))


def test_a_run_is_recorded_with_its_rate(tiny_config, tmp_path, recorded):
    summary = run_training(tiny_config(), tmp_path / "run", cache=tmp_path / "cache")
    assert [run.tokens_per_s for run in recorded()] == [summary["tokens_per_s"]]


def test_only_evaluations_that_were_done_count(tiny_config, tmp_path, recorded, monkeypatch):
    """The loss only rises, so the run ends at step 8, after two evaluations of ten."""

    def rising(run, **_):
        return Evaluation((SplitScore("tiny", "", 1.0, float(run.step), 64, 0),))

    monkeypatch.setattr(loop, "score", rising)
    config = tiny_config(train__steps=40, train__eval_every=4, train__patience=1)
    done = run_training(config, tmp_path / "run", cache=tmp_path / "cache")
    (run,), tokens = recorded(), Dataset.open(config.data.path).split("val").num_tokens
    scored_s = 2 * tokens / EVALUATION_COST / run.tokens_per_s
    assert done["steps"] == 8
    trained_s = done["tokens"] / run.tokens_per_s
    assert run.beside_s == pytest.approx(done["wall_s"] - trained_s - scored_s)


def test_a_run_without_a_cache_is_not_recorded(tiny_config, tmp_path, recorded):
    run_training(tiny_config(), tmp_path / "run")
    assert recorded() == []


def test_a_resumed_run_is_not_recorded(tiny_config, tmp_path, stop_at, recorded):
    config, cache = tiny_config(train__steps=20), tmp_path / "cache"
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", cache=cache, observers=[stop_at(4)])
    run_training(config, tmp_path / "run", cache=cache)
    assert recorded() == []
