"""A run's folder turned back into its model."""

import pytest
import torch

from flatout import loading
from flatout.errors import CheckpointError, ConfigError


def test_checkpoints_by_name(fox_run):
    folder = fox_run[0] / "runs" / "fox"
    assert loading.find_checkpoint(folder, "last").name == "step-3"
    assert loading.find_checkpoint(folder, "1").name == "step-1"
    assert loading.find_checkpoint(folder, "best").parent == folder / "checkpoints"
    with pytest.raises(CheckpointError, match="no checkpoint of step 7") as error:
        loading.find_checkpoint(folder, "7")
    assert "1, 2, 3" in error.value.fix
    with pytest.raises(ConfigError, match="best, last, or the number"):
        loading.find_checkpoint(folder, "newest")


def test_different_checkpoints_have_different_weights(fox_run):
    folder = fox_run[0] / "runs" / "fox"
    first, last = (loading.load_run(folder, name, device="cpu").model.state_dict() for name in ("1", "last"))
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_runs_are_found_by_name_and_mistyped_names_answered(fox_run, monkeypatch):
    monkeypatch.chdir(fox_run[0])
    assert loading.find_run("fox").resolve() == fox_run[0] / "runs" / "fox"
    with pytest.raises(CheckpointError, match="Did you mean runs/fox"):
        loading.find_run("foxx")


def test_the_runs_own_speedups_that_do_not_work_here_are_left_out(fox_run):
    config = loading.load_run(fox_run[0] / "runs" / "fox", device="cpu").config
    wanted = config.with_values({"speedups": ["tf32", "compile", "fused-attention"], "train.device": "cpu"})
    assert [decision.name for decision in loading._usable_speedups(wanted, loading.ONLY_IN_TRAINING)] == ["fused-attention"]
