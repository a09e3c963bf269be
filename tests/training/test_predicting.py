"""A run is predicted before its first step, rejected if it cannot fit, and recorded at its end."""

from __future__ import annotations

import pytest

from flatout.assembly import memory
from flatout.assembly.memory import Capacity
from flatout.assembly.prediction import runs_here
from flatout.errors import HardwareError, Stopped
from flatout.hardware.machine import probe
from flatout.training import predicting
from flatout.training.run import run_training
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow


@pytest.fixture
def recorded(tmp_path):
    """Return the runs recorded in this test's cache."""
    return lambda: list(runs_here(probe(), "cpu", tmp_path / "cache"))


def test_a_run_states_what_was_predicted_and_is_recorded(tiny_config, tmp_path, recorded):
    cache = tmp_path / "cache"
    summaries = [
        run_training(tiny_config(), tmp_path / name, cache=cache) for name in ("one", "two")
    ]
    one, two = (summary["predicted"] for summary in summaries)
    assert one["peak_gib_from"] == two["peak_gib_from"] == "traced in eager mode"
    assert two["tokens_per_s"] == pytest.approx(summaries[0]["tokens_per_s"])
    assert two["tokens_per_s_from"].startswith("1 earlier run of this shape here")
    assert RunLog(tmp_path / "two").summary["predicted"] == two
    (event,) = [e for e in RunLog(tmp_path / "two").events if e["event"] == "predicted"]
    assert event["wall_s"] == two["wall_s"]
    assert recorded()[0].tokens_per_s == summaries[0]["tokens_per_s"]


def test_a_run_without_a_cache_is_not_recorded(tiny_config, tmp_path, recorded):
    assert run_training(tiny_config(), tmp_path / "run")["predicted"]
    assert recorded() == []


def test_a_resumed_run_is_predicted_and_not_recorded(tiny_config, tmp_path, stop_at, recorded):
    config, cache = tiny_config(train__steps=20), tmp_path / "cache"
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", cache=cache, observers=[stop_at(4)])
    assert run_training(config, tmp_path / "run", cache=cache)["predicted"]["wall_s"]
    assert recorded() == []


def test_a_micro_batch_that_cannot_fit_is_rejected_before_anything_is_written(
    tiny_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        predicting, "capacity_of", lambda *_: Capacity(1_140_000, 1_140_000, "machine")
    )
    config = tiny_config(batch__rows_per_device=8)
    with pytest.raises(HardwareError, match=r"Set batch\.rows_per_device="):
        run_training(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_stored_run_is_never_rejected(tiny_config, tmp_path, monkeypatch, stop_at):
    config = tiny_config(train__steps=20)
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(4)])
    monkeypatch.setattr(predicting, "capacity_of", lambda *_: Capacity(1, 1, "machine"))
    assert run_training(config, tmp_path / "run")["steps"] == 20


def test_a_run_that_would_swap_starts_with_a_warning(tiny_config, tmp_path, monkeypatch, messages):
    monkeypatch.setattr(predicting, "capacity_of", lambda *_: Capacity(2**40, 1000, "machine"))
    run_training(tiny_config(), tmp_path / "run", progress=messages)
    assert any("slower if the system swaps" in line for line in messages.lines)


def test_a_model_that_needs_values_trains_without_a_memory_estimate(
    tiny_config, tmp_path, monkeypatch, messages
):
    def refuse(*_):
        raise ValueError("this model looks at its tokens")

    monkeypatch.setattr(memory, "estimate", refuse)
    summary = run_training(tiny_config(), tmp_path / "run", progress=messages)
    assert summary["predicted"]["peak_gib"] is None
    assert any("this model looks at its tokens" in line for line in messages.lines)
