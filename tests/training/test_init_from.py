"""`train.init_from` takes only another run's weights, and rejects models that do not fit."""

import json
import shutil

import numpy as np
import pytest
import torch
from fakes import restate
from safetensors.torch import save_file

from flatout.config.schema import load_config
from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import CheckpointError, ConfigError, Stopped
from flatout.training import run as training
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.contents import digest_of
from flatout.training.checkpoint.merged import read_merged
from flatout.training.init_from import find_weights, run_of
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tiny_set, tiny, tmp_path_factory):
    """Return a run of six steps whose state names step 4 as the best."""
    folder = tmp_path_factory.mktemp("source") / "run"
    config = load_config().with_values(
        {**tiny, "data.path": str(tiny_set), "train.eval_every": 2, "checkpoint.keep": 9}
    )
    run_training(config, folder)
    newest = catalog.checkpoint_path(folder, 6)
    state = json.loads((newest / "state.json").read_text())
    state["values"]["best"]["step"] = 4
    (newest / "state.json").write_text(json.dumps(state))
    restate(newest)
    return folder


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_starts_with_the_best_weights_and_nothing_else(
    tiny_config, source, ragged_set, tmp_path, events
):
    config = tiny_config(
        train__init_from=str(source), data__path=str(ragged_set), train__steps=3, checkpoint__keep=9
    )
    summary = run_training(config, tmp_path / "run")
    best = catalog.checkpoint_path(source, 4)
    assert equal(read_merged(catalog.checkpoint_path(tmp_path / "run", 0)), read_merged(best))
    first = catalog.checkpoint_path(tmp_path / "run", 0) / "state.json"
    state = json.loads(first.read_text())["values"]
    assert (state["step"], state["tokens"], state["loader"]) == (0, 0, {"position": 0})
    assert state["best"] == {"val_loss": None, "step": None, "evaluations_since": 0}
    assert state["optimizer"]["scalars"] == {}
    assert summary["steps"] == 3
    assert summary["resumed_from"] is None
    assert read_config(tmp_path / "run").train.init_from == str(best)
    assert [event["init_from"] for event in events(tmp_path / "run", "start")] == [str(best)]


def test_the_data_is_that_of_a_fresh_run(tiny_config, source, tmp_path, stop_at):
    with pytest.raises(Stopped):
        run_training(tiny_config(checkpoint__keep=9), tmp_path / "fresh", observers=[stop_at(1)])
    with pytest.raises(Stopped):
        run_training(
            tiny_config(train__init_from=str(source), checkpoint__keep=9),
            tmp_path / "from",
            observers=[stop_at(1)],
        )
    fresh, started = (
        json.loads((tmp_path / name / "checkpoints" / "step-1" / "state.json").read_text())
        for name in ("fresh", "from")
    )
    assert fresh["values"]["loader"] == started["values"]["loader"]


def test_a_checkpoint_can_be_named(tiny_config, source, tmp_path):
    chosen = catalog.checkpoint_path(source, 2)
    run_training(tiny_config(train__init_from=str(chosen), train__steps=1), tmp_path / "run")
    assert digest_of(catalog.checkpoint_path(tmp_path / "run", 0)) == digest_of(chosen)


def test_a_run_resumes_after_its_source_was_deleted(tiny_config, source, tmp_path, stop_at):
    copy = shutil.copytree(source, tmp_path / "copy")
    config = tiny_config(train__init_from=str(copy), train__steps=4)
    whole = run_training(
        tiny_config(train__init_from=str(source), train__steps=4), tmp_path / "whole"
    )
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(2)])
    shutil.rmtree(copy)
    resumed = run_training(config, tmp_path / "run")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert run_training(config, tmp_path / "run") == resumed


def test_the_weights_are_loaded_before_the_first_step(tiny_config, source, tmp_path, killed_in):
    copy = shutil.copytree(source, tmp_path / "copy")
    config = tiny_config(train__init_from=str(copy), train__steps=1)
    with killed_in(training, "warm_up"):
        run_training(config, tmp_path / "run")
    shutil.rmtree(copy)
    assert run_training(config, tmp_path / "run")["steps"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__d_model": 64},
            r"weight is \[32, 32\] there and \[64, 64\] here.*\. "
            r"Fix: Add these overrides: model\.d_model=32 ",
        ),
        ({"model__num_layers": 1}, r"blocks\.1.* there and missing here.*model\.num_layers=2"),
        ({"model__num_layers": 3}, r"blocks\.2.* is missing there.*model\.num_layers=2"),
        ({"model__num_heads": 4}, r"model\.num_heads is 2 there and 4 here.*model\.num_heads=2"),
        ({"model__tied_head": False}, r"model\.tied_head=true"),
        ({"model__vocab_size": 320}, r"model\.vocab_size=257"),
    ],
)
def test_another_model_is_rejected_with_the_overrides_to_paste(
    tiny_config, source, tmp_path, changes, message
):
    with pytest.raises(ConfigError, match=message) as refused:
        run_training(tiny_config(train__init_from=str(source), **changes), tmp_path / "run")
    assert refused.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_learned_positions_of_another_length_are_rejected(tiny_config, tmp_path):
    run_training(tiny_config(model__positions="learned", train__steps=1), tmp_path / "source")
    longer = {"model__positions": "learned", "data__seq_len": 32, "batch__tokens_per_step": 256}
    with pytest.raises(
        ConfigError, match=r"is \[16, 32\] there and \[32, 32\] here.*model\.max_seq_len=16"
    ):
        run_training(
            tiny_config(train__init_from=str(tmp_path / "source"), **longer), tmp_path / "run"
        )


def test_keys_that_do_not_affect_the_weights_may_differ_and_are_reported(
    tiny_config, source, tmp_path, messages
):
    changes = {
        "model__dropout": 0.1,
        "data__seq_len": 32,
        "batch__tokens_per_step": 256,
        "train__steps": 1,
    }
    run_training(
        tiny_config(train__init_from=str(source), **changes), tmp_path / "run", progress=messages
    )
    assert any(
        "model.dropout is 0.0 where the weights come from, and 0.1 here" in line
        for line in messages.lines
    )


def test_other_chunks_and_initial_memories_are_the_same_model(tiny_config, tmp_path):
    eigenstate = {
        "model__kind": "eigenstate",
        "model__d_model": 8,
        "model__num_eigenstates": 4,
        "model__num_heads": 2,
        "train__steps": 1,
    }
    run_training(
        tiny_config(**eigenstate, model__chunk_size=128, model__initialisation="published"),
        tmp_path / "source",
    )
    longer = {"data__seq_len": 32, "batch__tokens_per_step": 256}
    summary = run_training(
        tiny_config(**eigenstate, **longer, train__init_from=str(tmp_path / "source")),
        tmp_path / "run",
    )
    assert summary["steps"] == 1


def test_another_tokenizer_of_the_same_size_is_rejected(tiny_config, source, tmp_path):
    letters = [chr(32 + number) for number in range(95)]
    folders = []
    for name, text in (("one", letters), ("two", [*letters[1:], "é"])):
        tokenizer = make_tokenizer("char", lambda _, text=text: ["".join(text)])
        with DatasetWriter(tmp_path / name, tokenizer) as writer:
            tokens = np.array(tokenizer.encode("".join(text) * 9))
            writer.append("train", tokens, [len(tokens)], text_bytes=len(tokens))
            writer.finish(source={}, split_rule="none")
        folders.append(str(tmp_path / name))
    run_training(tiny_config(data__path=folders[0], train__steps=1), tmp_path / "source")
    assert read_config(tmp_path / "source").model.vocab_size == tokenizer.vocab_size
    with pytest.raises(
        CheckpointError,
        match=r"two was prepared with a different tokenizer.*--tokenizer .*source/tokenizer\.json",
    ):
        run_training(
            tiny_config(data__path=folders[1], train__init_from=str(tmp_path / "source")),
            tmp_path / "run",
        )


def test_a_missing_run_is_rejected_with_the_nearest_name(
    tiny_config, source, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(source, tmp_path / "runs" / "shakespeare")
    assert find_weights("shakespeare") == catalog.checkpoint_path(
        tmp_path / "runs" / "shakespeare", 4
    ).relative_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"Did you mean runs/shakespeare\?"):
        run_training(tiny_config(train__init_from="runs/shakespear"), tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="there is no such run or checkpoint"):
        find_weights("empty")
    shutil.rmtree(tmp_path / "runs" / "shakespeare" / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        find_weights("runs/shakespeare")


def test_resume_and_init_from_exclude_each_other(tiny_config, source, tmp_path):
    with pytest.raises(ConfigError, match="Use one of the two"):
        run_training(
            tiny_config(train__init_from=str(source)), tmp_path / "run", resume=str(source)
        )
    assert not (tmp_path / "run").exists()


def test_the_run_of_a_checkpoint_is_found_unless_it_was_copied_elsewhere(
    tiny_config, source, tmp_path
):
    assert run_of(catalog.checkpoint_path(source, 2)) == source
    alone = shutil.copytree(catalog.checkpoint_path(source, 2), tmp_path / "step-2")
    assert run_of(alone) is None
    config = tiny_config(train__init_from=str(alone), train__steps=1)
    assert run_training(config, tmp_path / "run")["steps"] == 1


def test_weights_with_the_names_of_the_runs_own_model_are_read_from_any_file(
    tiny, tiny_set, tmp_path, monkeypatch
):
    """Plain torch, Lightning, torch.compile and accelerate save the same weights of a module."""
    (tmp_path / "own_module.py").write_text(
        "import torch\nfrom flatout.models.adapter import adapt\n"
        "class Module(torch.nn.Module):\n"
        "    def __init__(self, vocab_size):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(vocab_size, 8)\n"
        "        self.head = torch.nn.Linear(8, vocab_size, bias=False)\n"
        "        self.head.weight = self.table.weight\n"
        "    def forward(self, tokens):\n"
        "        return self.head(self.table(tokens))\n"
        "def build(vocab_size: int):\n"
        "    return Module(vocab_size)\n"
        "MODEL = adapt(build)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    values = {key: value for key, value in tiny.items() if not key.startswith("model.")}
    values |= {"data.path": str(tiny_set), "train.eval_every": 0, "train.steps": 1}
    config = load_config().with_values(values | {"model.kind": "own_module:MODEL"})
    rows = Dataset.open(tiny_set).vocab_size
    weight = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    both = {"table.weight": weight, "head.weight": weight}
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.yaml").write_text("lr: 1\n")  # of another tool, as all that lies here
    (folder / "config.json").write_text('{"hidden": 8}')
    torch.save({"model_state_dict": both, "optimizer_state_dict": {}, "epoch": 3}, folder / "x.pt")
    torch.save({"state_dict": {f"model.{k}": v for k, v in both.items()}}, folder / "last.ckpt")
    torch.save({f"_orig_mod.{name}": value for name, value in both.items()}, folder / "compiled.pt")
    save_file({"head.weight": weight}, folder / "model.safetensors")
    for name in ("x.pt", "last.ckpt", "compiled.pt", "model.safetensors", ""):
        run = tmp_path / f"run-{name}"
        run_training(config.with_values({"train.init_from": str(folder / name)}), run)
        stored = read_merged(catalog.checkpoint_path(run, 0))
        assert all(torch.equal(value, weight) for value in stored.values()), name
    torch.save({"table.weight": weight, "norm.weight": weight[0]}, folder / "other.pt")
    with pytest.raises(CheckpointError, match="nor is it this run's model: it has norm"):
        run_training(
            config.with_values({"train.init_from": str(folder / "other.pt")}), tmp_path / "other"
        )
