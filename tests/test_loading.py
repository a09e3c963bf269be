"""A run's folder turned back into its model."""

import shutil
from dataclasses import replace

import pytest
import torch

from flatout import loading
from flatout.commands.eval import evaluate
from flatout.errors import CheckpointError
from flatout.hardware import probe
from flatout.ops import Ops
from flatout.recipe import FP32
from flatout.registry import SPEEDUPS
from flatout.training.start import run_training


def test_different_checkpoints_have_different_weights(fox_run):
    folder = fox_run[0] / "runs" / "fox"
    first, last = (loading.load_run(folder, name, device="cpu").model.state_dict() for name in ("1", "last"))
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_the_runs_own_speedups_that_do_not_work_here_are_left_out(fox_run):
    config = loading.load_run(fox_run[0] / "runs" / "fox", device="cpu").config
    wanted = config.with_values({"speedups": ["tf32", "compile", "fused-attention"], "train.device": "cpu"})
    assert [decision.name for decision in loading._usable_speedups(wanted, "trained")] == ["fused-attention"]


def test_a_config_that_describes_another_model_than_the_weights_is_refused(fox_run, tmp_path):
    folder = tmp_path / "fox"
    shutil.copytree(fox_run[0] / "runs" / "fox", folder)
    config = folder / "config.yaml"
    assert "num_layers: 1" in config.read_text()
    config.write_text(config.read_text().replace("num_layers: 1", "num_layers: 2"))
    with pytest.raises(CheckpointError, match=r"not those of the model in .*config\.yaml"):
        loading.load_run(folder, device="cpu")


@pytest.fixture
def narrow_run(tiny_config, tmp_path, monkeypatch):
    """Return a function that trains a run with a speedup that narrows its arithmetic on a CPU, and returns its folder and summary."""
    machine = replace(probe(), cpu_multiplies_bf16=True)
    monkeypatch.setattr("flatout.loading.probe", lambda: machine)
    monkeypatch.setattr("flatout.training.start.probe", lambda: machine)

    def train(name):
        config = tiny_config(speedups=f"auto,-compile,+{name}", train__precision="bf16")
        return tmp_path / name, run_training(config, tmp_path / name)

    return train


@pytest.mark.parametrize("name", ["bf16-products", "bf16"])
def test_a_run_is_loaded_in_fp32_and_scored_in_the_precision_it_was_trained_in(narrow_run, name):
    folder, summary = narrow_run(name)
    tokens_BT = torch.arange(16)[None] % 50
    loaded, trained = loading.load_run(folder, "last"), loading.load_run(folder, "last", precision="trained")
    plain_class = type(loaded.model)
    plain = plain_class(loaded.model.config, Ops.plain())
    plain.load_state_dict(loaded.model.state_dict())

    def logits(model):
        with torch.no_grad():
            return model(tokens_BT, tokens_BT)[0]

    assert loaded.recipe.part("precision") == FP32
    torch.testing.assert_close(logits(loaded.model), logits(plain.eval()), rtol=1e-6, atol=0)
    assert trained.recipe.part("precision").name == "bf16"
    assert evaluate(folder, "last").val_loss == pytest.approx(summary["val_loss"], rel=1e-6)


def test_what_works_in_a_narrow_precision_only_is_left_out_with_it():
    narrow = {name for name in SPEEDUPS.names() if loading._narrows(SPEEDUPS.get(name))}
    assert {"bf16", "fp16", "fp8", "bf16-products", "bf16-states", "bf16-weights"} <= narrow
    assert not {"fused-attention", "triton-scan", "folded-weights", "chunked-ce", "compile"} & narrow
