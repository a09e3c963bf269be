"""A run's folder turned back into its model."""

import shutil

import pytest
import torch

from flatout import loading
from flatout.errors import CheckpointError


def test_different_checkpoints_have_different_weights(fox_run):
    folder = fox_run[0] / "runs" / "fox"
    first, last = (loading.load_run(folder, name, device="cpu").model.state_dict() for name in ("1", "last"))
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_the_runs_own_speedups_that_do_not_work_here_are_left_out(fox_run):
    config = loading.load_run(fox_run[0] / "runs" / "fox", device="cpu").config
    wanted = config.with_values({"speedups": ["tf32", "compile", "fused-attention"], "train.device": "cpu"})
    assert [decision.name for decision in loading._usable_speedups(wanted, loading.ONLY_IN_TRAINING)] == ["fused-attention"]


def test_a_config_that_describes_another_model_than_the_weights_is_refused(fox_run, tmp_path):
    folder = tmp_path / "fox"
    shutil.copytree(fox_run[0] / "runs" / "fox", folder)
    config = folder / "config.yaml"
    assert "num_layers: 1" in config.read_text()
    config.write_text(config.read_text().replace("num_layers: 1", "num_layers: 2"))
    with pytest.raises(CheckpointError, match=r"not those of the model in .*config\.yaml"):
        loading.load_run(folder, device="cpu")
