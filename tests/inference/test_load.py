"""A run's folder turned back into its model."""

import shutil
from dataclasses import replace

import pytest
import torch

from flatout.assembly.recipe import FP32
from flatout.commands.eval import evaluate
from flatout.commands.generate import generate
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.hardware import probe
from flatout.inference import load
from flatout.ops import Ops
from flatout.registry import SPEEDUPS
from flatout.training.run import run_training
from flatout.training.run_dir.config_seal import COPY
from flatout.training.run_dir.layout import trusted_config, write_config


def test_different_checkpoints_have_different_weights(fox_run):
    folder = fox_run[0] / "runs" / "fox"
    first, last = (
        load.load_run(folder, name, device="cpu").model.state_dict() for name in ("1", "last")
    )
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_the_runs_own_speedups_that_do_not_work_here_are_left_out(fox_run):
    config = load.load_run(fox_run[0] / "runs" / "fox", device="cpu").config
    wanted = config.with_values({"speedups": ["tf32", "fused-attention"], "train.device": "cpu"})
    assert [decision.name for decision in load._usable_speedups(wanted, "trained")] == [
        "fused-attention"
    ]


def test_a_config_that_describes_another_model_than_the_weights_is_refused(fox_run, tmp_path):
    folder = tmp_path / "fox"
    shutil.copytree(fox_run[0] / "runs" / "fox", folder)
    config = folder / "config.yaml"
    assert "num_layers: 1" in config.read_text()
    config.write_text(
        config.read_text().rpartition("# sha256")[0].replace("num_layers: 1", "num_layers: 2")
    )
    (folder / COPY).unlink()  # as an earlier version wrote it
    with pytest.raises(CheckpointError, match=r"not those of the model in .*config\.yaml"):
        load.load_run(folder, device="cpu")


@pytest.fixture
def copied_run(fox_run, tmp_path):
    shutil.copytree(fox_run[0] / "runs" / "fox", tmp_path / "fox")
    return tmp_path / "fox"


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_heads: 1", "num_heads: 2", "model.num_heads: 1 -> 2"),
        ("\n  seq_len: 32", "\n  seq_len: 16", "data.seq_len: 32 -> 16"),
    ],
)
@pytest.mark.parametrize(
    "use", [load.load_run, evaluate, generate, trusted_config], ids=lambda use: use.__name__
)
def test_a_changed_setting_of_the_model_is_named_wherever_a_run_is_used(
    copied_run, use, old, new, named
):
    edit(copied_run / "config.yaml", old, new)
    with pytest.raises(
        ConfigError, match=f"was changed after the run had started: {named}"
    ) as refused:
        use(copied_run)
    assert f"cp {copied_run / COPY} {copied_run / 'config.yaml'}" in refused.value.fix


def test_a_model_can_be_used_with_other_settings_on_purpose_as_the_message_says(copied_run):
    config = copied_run / "config.yaml"
    edit(config, "\n  seq_len: 32", "\n  seq_len: 16")
    (copied_run / COPY).unlink()
    with pytest.raises(
        ConfigError,
        match=r"config\.copy\.yaml, which shows what it was, is missing.*the last line of config\.yaml, which is a digest",
    ):
        load.load_run(copied_run, device="cpu")
    config.write_text("".join(config.read_text().splitlines(keepends=True)[:-1]))
    assert load.load_run(copied_run, device="cpu").config.data.seq_len == 16


def test_settings_that_matter_in_training_alone_do_not_keep_a_model_from_use(copied_run):
    edit(copied_run / "config.yaml", "lr: 0.1", "lr: 0.2")
    load.load_run(copied_run, device="cpu")


def test_one_flipped_bit_in_the_tokenizer_of_a_run_is_found_wherever_it_is_read(copied_run):
    path = copied_run / "tokenizer.json"
    edit(path, "Tab", "Uab")
    for use in (load.load_run, evaluate, generate):
        with pytest.raises(DataError, match=r"tokenizer\.json is damaged, or was replaced"):
            use(copied_run)
    config = load.trusted_config(copied_run)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged, or was replaced"):
        run_training(config, copied_run)
    begun = config.with_values({"train.init_from": str(copied_run)})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged, or was replaced"):
        run_training(begun, copied_run.parent / "begun")


def test_a_checkpoint_of_an_earlier_version_says_nothing_of_its_tokenizer(copied_run, monkeypatch):
    monkeypatch.setattr(load, "tokenizer_of", lambda _: None)
    edit(copied_run / "tokenizer.json", "Tab", "Uab")
    load.load_run(copied_run, device="cpu")


def test_data_with_another_tokenizer_than_the_model_was_trained_with_is_refused(
    copied_run, fox_run, tmp_path
):
    """In the data of the run itself, which was prepared again, and by a new run that goes on from
    its checkpoint.
    """
    shutil.copytree(fox_run[0] / "data", tmp_path / "data")
    config = load.trusted_config(copied_run).with_values({"data.path": str(tmp_path / "data")})
    shutil.rmtree(tmp_path / "data")
    text = (fox_run[0] / "book.txt").read_text().swapcase()
    (tmp_path / "book.txt").write_text(text)
    prepare_dataset(
        [str(tmp_path / "book.txt")],
        tmp_path / "data",
        Options(tokenizer="char", split="tail 0.1"),
        workers=1,
    )
    with pytest.raises(CheckpointError, match="was prepared with another tokenizer"):
        run_training(config, tmp_path / "on", resume=str(copied_run))
    write_config(copied_run, config)
    with pytest.raises(CheckpointError, match="was prepared with another tokenizer"):
        evaluate(copied_run)


@pytest.fixture
def narrow_run(tiny_config, tmp_path, monkeypatch):
    """Return a function that trains a run with a speedup that narrows its arithmetic on a CPU, and
    returns its folder and summary.
    """
    machine = replace(probe(), cpu_multiplies_bf16=True)
    monkeypatch.setattr("flatout.inference.load.probe", lambda: machine)
    monkeypatch.setattr("flatout.training.run.probe", lambda: machine)

    def train(name):
        config = tiny_config(speedups=f"auto,-compile,+{name}", train__precision="bf16")
        return tmp_path / name, run_training(config, tmp_path / name)

    return train


@pytest.mark.parametrize("name", ["bf16-products", "bf16"])
def test_a_run_is_loaded_in_fp32_and_scored_in_the_precision_it_was_trained_in(narrow_run, name):
    folder, summary = narrow_run(name)
    tokens_BT = torch.arange(16)[None] % 50
    loaded, trained = (
        load.load_run(folder, "last"),
        load.load_run(folder, "last", precision="trained"),
    )
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
    narrow = {name for name in SPEEDUPS.names() if load._narrows(SPEEDUPS.get(name))}
    assert {"bf16", "fp16", "fp8", "bf16-products", "bf16-states", "bf16-weights"} <= narrow
    assert (
        not {"fused-attention", "triton-scan", "folded-weights", "chunked-ce", "compile"} & narrow
    )
