"""A run starts with the weights of another tool's model."""

import json

import pytest
import torch
from foreign_models import DOCUMENTS, LLAMA, foreign_weights, joined, write_model

from flatout.config.schema import load_config
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import CheckpointError
from flatout.inference.load import load_run
from flatout.models.families.source import ForeignWeights
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.merged import load_initial_weights, read_merged
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_config

pytestmark = pytest.mark.slow
MODEL = LLAMA | {"vocab_size": 257}


@pytest.fixture
def theirs(tmp_path):
    return write_model(tmp_path / "theirs", MODEL)


@pytest.fixture
def fine_tuning(tiny, tiny_set):
    """Return a function that makes a configuration without the model's shape."""

    def make(init_from, **changes):
        kept = {key: value for key, value in tiny.items() if not key.startswith("model.")}
        values = {"data.path": str(tiny_set), "train.init_from": str(init_from), "train.steps": 2}
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        return load_config().with_values(kept | values | changed)

    return make


@pytest.mark.quick_cases("gpt2", "llama 2", "qwen3", "pythia")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_first_checkpoint_has_the_weights_of_the_base_model(tmp_path, fine_tuning, name):
    document = DOCUMENTS[name] | {"vocab_size": 257}
    folder = write_model(tmp_path / "theirs", document)
    summary = run_training(fine_tuning(folder, checkpoint__keep=9), tmp_path / "run")
    assert summary["steps"] == 2
    first = read_merged(catalog.checkpoint_path(tmp_path / "run", 0))
    expected = joined(document, foreign_weights(document))
    assert first.keys() >= expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(first[key], tensor)


def test_the_run_needs_the_base_model_only_once(tmp_path, theirs, fine_tuning, stop_at):
    config = fine_tuning(theirs, train__steps=3)
    with pytest.raises(BaseException, match="Stopped at step 1"):
        run_training(config, tmp_path / "run", observers=[stop_at(1)])
    assert read_config(tmp_path / "run").train.init_from == str(theirs)
    (theirs / "model.safetensors").unlink()
    (theirs / "config.json").unlink()
    assert run_training(config, tmp_path / "run")["steps"] == 3
    assert load_run(tmp_path / "run").model.config.activation == "swiglu"


def test_free_keys_that_differ_are_reported(tmp_path, theirs, fine_tuning, messages):
    run_training(fine_tuning(theirs, model__rotary_base=500.0), tmp_path / "run", progress=messages)
    assert (
        "model.rotary_base is 10000.0 where the weights come from, and 500.0 here."
        in messages.lines
    )
    assert f"Starting with the weights of {theirs}." in messages.lines


def test_a_model_that_does_not_fit_writes_nothing(tmp_path, theirs, fine_tuning):
    weights = foreign_weights(MODEL)
    del weights["model.norm.weight"]
    write_model(theirs, MODEL, weights)
    with pytest.raises(CheckpointError, match=r"it has no model\.norm\.weight"):
        run_training(fine_tuning(theirs), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_is_rejected(tmp_path, theirs, fine_tuning, messages):
    run_training(fine_tuning(theirs), tmp_path / "run", progress=messages)
    assert any("There is no tokenizer.json in" in line for line in messages.lines)
    byte = make_tokenizer("byte", lambda _: [])
    byte.save(theirs / "tokenizer.json")
    run_training(fine_tuning(theirs), tmp_path / "same")
    char = make_tokenizer("char", lambda _: ["The quick brown fox jumps over the lazy dog."])
    char.save(theirs / "tokenizer.json")
    with pytest.raises(CheckpointError, match="prepared with a different tokenizer"):
        run_training(fine_tuning(theirs), tmp_path / "other")


def test_a_tensor_of_another_shape_is_rejected_while_loading(
    theirs, fine_tuning, build_run, monkeypatch
):
    run = build_run(fine_tuning(theirs))
    read = ForeignWeights.read
    monkeypatch.setattr(ForeignWeights, "read", lambda self, name: read(self, name)[:3])
    with pytest.raises(CheckpointError, match="has the shape"):
        load_initial_weights(run.core, theirs)


def test_sharded_files_give_the_same_run(tmp_path, theirs, fine_tuning):
    from safetensors.torch import save_file

    names = sorted(foreign_weights(MODEL))
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    other = tmp_path / "sharded"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(MODEL))
    for file, part in shards.items():
        save_file({name: foreign_weights(MODEL)[name] for name in part}, other / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    results = [
        run_training(fine_tuning(folder), tmp_path / folder.name / "run")["weights_sha256"]
        for folder in (theirs, other)
    ]
    assert results[0] == results[1]
