"""Loading a run directory: checkpoints, speedups, changed settings, tokenizers, precision."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flatout.assembly.parts import FP32
from flatout.cli.commands.eval import evaluate
from flatout.cli.commands.generate import generate
from flatout.config.registry import SPEEDUPS
from flatout.config.schema import RunConfig
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.hardware.machine import probe
from flatout.inference import load
from flatout.ops import Ops
from flatout.progress import SILENT
from flatout.storage import whole
from flatout.training import run as training
from flatout.training.run import run_training
from flatout.training.run_dir import layout


def test_each_checkpoint_loads_its_own_weights(fox_run):
    folder = fox_run[0] / "runs" / "fox"
    first, last = (
        load.load_run(folder, name, device="cpu").model.state_dict() for name in ("1", "last")
    )
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("checkpoint", ["1", "best", "last"])
def test_only_the_files_that_are_read_are_hashed_each_once(fox_run, checkpoint, monkeypatch):
    hashed, sha256 = [], whole.sha256
    monkeypatch.setattr(whole, "sha256", lambda path: hashed.append(path) or sha256(path))
    loaded = load.load_run(fox_run[0] / "runs" / "fox", checkpoint, device="cpu")
    assert [path for path in hashed if path.suffix == ".safetensors"] == [
        loaded.checkpoint / "model-00000.safetensors"
    ]


def test_weights_whose_content_changed_are_not_loaded(copied_run):
    weights = copied_run / "checkpoints" / "step-3" / "model-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert load.load_run(copied_run, "last", device="cpu").checkpoint.name == "step-2"
    with pytest.raises(CheckpointError, match=r"model-00000\.safetensors is damaged"):
        load.load_run(copied_run, "3", device="cpu")


def test_another_precision_is_rejected(fox_run):
    with pytest.raises(ConfigError, match=r"precision='bf16' must be 'fp32' or 'trained'\."):
        load.load_run(fox_run[0] / "runs" / "fox", precision="bf16")


def test_speedups_that_do_not_work_here_are_skipped(fox_run):
    config = load.load_run(fox_run[0] / "runs" / "fox", device="cpu").config
    wanted = config.with_values({"speedups": ["tf32", "fused-attention"], "train.device": "cpu"})
    assert [*load._usable_speedups(wanted, "trained")] == ["fused-attention"]


def test_a_config_that_does_not_fit_the_weights_is_rejected(fox_run, tmp_path):
    folder = tmp_path / "fox"
    shutil.copytree(fox_run[0] / "runs" / "fox", folder)
    config = folder / "config.yaml"
    assert "num_layers: 1" in config.read_text()
    config.write_text(config.read_text().replace("num_layers: 1", "num_layers: 2"))
    with pytest.raises(CheckpointError, match=r"do not fit the model in .*config\.yaml"):
        load.load_run(folder, device="cpu")


@pytest.fixture
def copied_run(fox_run, tmp_path):
    shutil.copytree(fox_run[0] / "runs" / "fox", tmp_path / "fox")
    return tmp_path / "fox"


def test_a_key_without_effect_is_said_and_changes_nothing(copied_run):
    """An earlier version accepted it."""
    before, lines = load.load_run(copied_run, device="cpu").model, []
    stored, first = layout.read_config(copied_run), layout.read_requested(copied_run)
    old = {"model.rotary_factor": 4.0}
    layout.write_config(copied_run, stored.with_values(old), requested=first.with_values(old))
    progress = SimpleNamespace(say=lines.append, task=SILENT.task)
    after = load.load_run(copied_run, device="cpu", progress=progress).model
    assert [line for line in lines if "model.rotary_factor=4.0 has no effect" in line] == lines
    assert len(lines) == 1
    tokens_BT = torch.arange(8)[None]
    assert torch.equal(before.logits(tokens_BT), after.logits(tokens_BT))


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_changed_training_settings_do_not_prevent_loading(copied_run):
    edit(copied_run / "config.yaml", "lr: 0.1", "lr: 0.2")
    load.load_run(copied_run, device="cpu")


@pytest.mark.slow
def test_a_damaged_tokenizer_is_detected_by_every_use_of_the_run(copied_run):
    path = copied_run / "tokenizer.json"
    edit(path, '"version":', '"version": ')
    for use in (load.load_run, evaluate, generate):
        with pytest.raises(DataError, match=r"tokenizer\.json is damaged or was replaced"):
            use(copied_run)
    config = load.trusted_config(copied_run)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged or was replaced"):
        run_training(config, copied_run)
    started = config.with_values({"train.init_from": str(copied_run)})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged or was replaced"):
        run_training(started, copied_run.parent / "started")


def test_a_checkpoint_without_a_tokenizer_digest_still_loads(copied_run, monkeypatch):
    monkeypatch.setattr(load, "tokenizer_of", lambda _: None)
    edit(copied_run / "tokenizer.json", '"version":', '"version": ')
    load.load_run(copied_run, device="cpu")


@pytest.fixture
def narrow_run(tiny_config, tmp_path, monkeypatch):
    """Return a function that trains a run with a low-precision speedup on a CPU.

    It returns the run directory and the summary.
    """
    machine = replace(probe(), cpu_multiplies_bf16=True)
    monkeypatch.setattr(load, "probe", lambda: machine)
    monkeypatch.setattr(training, "probe", lambda: machine)

    def train(name):
        config = tiny_config(speedups=f"auto,-compile,+{name}", train__precision="bf16")
        return tmp_path / name, run_training(config, tmp_path / name)

    return train


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16-products", "bf16"])
def test_a_run_loads_in_fp32_and_is_scored_in_its_training_precision(narrow_run, name):
    folder, summary = narrow_run(name)
    tokens_BT = torch.arange(16)[None] % 50
    loaded = load.load_run(folder, "last")
    trained = load.load_run(folder, "last", precision="trained")
    plain = type(loaded.model)(loaded.model.config, Ops.plain())
    plain.load_state_dict(loaded.model.state_dict())

    def logits(model):
        with torch.no_grad():
            return model(tokens_BT, tokens_BT)[0]

    assert loaded.parts.precision == FP32
    torch.testing.assert_close(logits(loaded.model), logits(plain.eval()), rtol=1e-6, atol=0)
    assert trained.parts.precision.name == "bf16"
    assert evaluate(folder, "last").val_loss == pytest.approx(summary["val_loss"], rel=1e-6)


def test_speedups_that_need_a_low_precision_are_skipped_with_it():
    narrow = {name for name in SPEEDUPS.names() if load._lowers_precision(name)}
    assert {"bf16", "fp16", "fp8", "bf16-products"} <= narrow
    assert not {"fused-attention", "triton-scan", "chunked-ce", "compile"} & narrow


def test_stored_speedups_that_this_version_does_not_have_are_omitted():
    config = RunConfig().with_values({"speedups": ["fused-adamw", "of-another-version"]})
    assert [*load._usable_speedups(config, "trained")] == ["fused-adamw"]
