"""`flatout convert` renames what means the same, and answers every other key."""

import json

import numpy as np
import pytest
import yaml

from flatout.cli.commands.convert import Item, convert_config
from flatout.config.documents import read_document
from flatout.config.schema import load_config
from flatout.config.words import listings
from flatout.errors import ConfigError, OutputInUse

TRAINER = {
    "output_dir": "out",
    "max_steps": -1,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "bf16": True,
    "fp16": False,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 0,
    "warmup_ratio": 0.1,
    "adam_beta1": 0.8,
    "optim": "adamw_torch_fused",
    "eval_strategy": "epoch",
    "gradient_checkpointing": True,
    "tf32": False,
    "report_to": ["wandb", "tensorboard"],
    "rope_scaling": {"factor": 2},
    "hub_token": "hf_xyz",
    "colour": "red",
}


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(TRAINER))
    return path


def converted(tmp_path, document):
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    found = convert_config(tmp_path / "old.yaml", tmp_path / "my.yaml")
    return found, load_config(tmp_path / "my.yaml")


def test_keys_that_mean_the_same_are_in_the_recipe_and_every_other_key_is_answered(old, tmp_path):
    out = tmp_path / "new" / "my.yaml"
    found = convert_config(old, out)
    config = load_config(out)
    assert (config.train.epochs, config.batch.rows_per_device, config.name) == (2, 4, "my")
    assert (config.train.precision, config.schedule.kind, config.schedule.warmup) == (
        *("bf16", "constant"),
        0.1,
    )
    assert (config.optim.kind, config.train.eval_every_epochs, config.log.to) == (
        *("adamw", 1),
        ("wandb", "tensorboard"),
    )
    assert config.speedups == "auto,+checkpointing,-tf32"
    assert [item.key for item in found.items] == [*TRAINER]
    outcomes = {item.key: item.outcome for item in found.items}
    assert [key for key, outcome in outcomes.items() if outcome == "unnecessary"] == [
        *("output_dir", "max_steps", "fp16", "warmup_steps")
    ]
    assert (outcomes["adam_beta1"], outcomes["rope_scaling"], outcomes["colour"]) == (
        *("by_hand", "missing"),
        "unknown",
    )
    text = out.read_text()
    assert text.startswith(
        "# Converted by `flatout convert` from old.json\n"
        "# adam_beta1=0.8 was not converted: see optim.betas. "
    )
    assert "hf_xyz" not in text + found.summary()
    for line in ("Mapped: 10", "bf16=True  ", "To convert by hand: 1", "Next: flatout plan"):
        assert line in found.summary()


@pytest.mark.parametrize(
    ("document", "key", "outcome", "about"),
    [
        ({"max_steps": 5, "epochs": 1}, "epochs", "by_hand", "train.steps"),
        ({"batch_size": -3}, "batch_size", "by_hand", "batch.rows_per_device=-3 is not valid"),
        ({"optimizer": "lion"}, "optimizer", "by_hand", "adamw, muon"),
        ({"activation_checkpointing": "selective"}, "activation_checkpointing", "by_hand", "auto,"),
        ({"compile": True}, "compile", "unnecessary", "by default"),
        ({"deepspeed": {"stage": 2}}, "deepspeed", "unnecessary", "parallel.shard"),
        ({"val_set_size": 0.1}, "val_set_size", "by_hand", "hash 0.05"),
        ({"learning_rate": 1e-4, "peak_lr": 1e-3}, "peak_lr", "by_hand", "optim.lr=0.0001 is set"),
        ({"load_in_4bit": True}, "load_in_4bit", "missing", "no QLoRA"),
        ({"load_in_4bit": False}, "load_in_4bit", "unnecessary", "off"),
    ],
)
def test_a_value_that_does_not_carry_over_is_listed_with_the_reason(
    tmp_path, document, key, outcome, about
):
    found, _ = converted(tmp_path, {"weight_decay": 0.1} | document)
    item = next(item for item in found.items if item.key == key)
    assert item.outcome == outcome
    assert about in item.note


def test_a_key_that_needs_another_one_may_come_first(tmp_path):
    _, config = converted(
        tmp_path, {"lora_alpha": 16, "lora_target_modules": ["q_proj", "v_proj"], "lora_r": 8}
    )
    assert (config.lora.alpha, config.lora.rank, config.lora.targets) == (16, 8, ("q", "v"))


def test_tokens_that_are_here_are_answered_with_the_line_that_imports_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "chunk_000000.pt").write_bytes(b"")
    converted(tmp_path, {"weight_decay": 0.1, "pretokenized": "old"})
    text = (tmp_path / "my.yaml").read_text()
    assert (
        "# pretokenized=old was not converted: see data.path. Import it: `flatout import old --out "
        "data/old --tokenizer FILE`, where FILE is the tokenizer that made the tokens.\n"
    ) in text
    (tmp_path / "old" / "metadata.json").write_text("{}")
    (tmp_path / "my.yaml").unlink()
    found, _ = converted(tmp_path, {"weight_decay": 0.1, "pretokenized": "old"})
    assert found.items[1].note == (
        "Import it: `flatout import old --out data/old`, with --tokenizer FILE if metadata.json "
        "names none."
    )
    (tmp_path / "my.yaml").unlink()
    found, _ = converted(tmp_path, {"weight_decay": 0.1, "dataset": "s3://bucket/set"})
    assert found.items[1].note == "The directory that `flatout prepare` wrote."


def test_tokens_of_any_kind_beside_the_config_are_answered_with_their_import(tmp_path):
    """Their paths are relative to the config, and a directory of directories is one dataset."""
    packed = tmp_path / "packed"
    for split in ("train", "val"):
        (packed / split).mkdir(parents=True)
        (packed / split / "chunk_000000.pt").write_bytes(b"")
    np.save(tmp_path / "some.npy", np.arange(20))
    (packed / "metadata.json").write_text("{}")
    np.arange(20, dtype="uint16").tofile(tmp_path / "all.bin")
    (tmp_path / "book.txt").write_text("text")
    document = {"weight_decay": 0.1, "pretokenized": "packed", "dataset": "all.bin"}
    found, _ = converted(tmp_path, document | {"train_file": "book.txt"})
    notes = {item.key: item.note for item in found.items}
    assert notes["pretokenized"] == (
        f"Import it: `flatout import {packed} --out data/packed`, with --tokenizer FILE if "
        "metadata.json names none."
    )
    assert notes["dataset"].startswith(
        f"Import it: `flatout import {tmp_path}/all.bin --out data/a"
    )
    assert "Import" not in notes["train_file"]
    (tmp_path / "my.yaml").unlink()
    found, _ = converted(tmp_path, {"weight_decay": 0.1, "dataset": f"{tmp_path}/some.npy"})
    assert f"flatout import {tmp_path}/some.npy --out data/some" in found.items[1].note


def test_tokens_of_nanogpt_are_found_in_the_data_directory_that_it_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "ows").mkdir(parents=True)
    for name in ("train", "val"):
        np.arange(20, dtype="uint16").tofile(tmp_path / "data" / "ows" / f"{name}.bin")
    found, _ = converted(tmp_path, {"weight_decay": 0.1, "dataset": "ows"})
    line = "`flatout import data/ows --out data/ows-imported --tokenizer FILE`"
    assert found.items[1].note.startswith(f"Import it: {line}")
    (tmp_path / "config").mkdir()
    (tmp_path / "my.yaml").unlink()
    monkeypatch.chdir(tmp_path / "config")
    (tmp_path / "config" / "old.yaml").write_text("{weight_decay: 0.1, dataset: ows}")
    found = convert_config("old.yaml", "my.yaml")
    assert "`flatout import ../data/ows --out data/ows" in found.items[1].note


def test_no_file_is_replaced(old, tmp_path):
    (tmp_path / "my.yaml").write_text("name: mine\n")
    with pytest.raises(OutputInUse, match="exists"):
        convert_config(old, tmp_path / "my.yaml")


@pytest.mark.parametrize("tool", listings())
def test_every_key_of_a_tool_is_shown_with_its_counterpart(tool):
    found = convert_config(keys=tool.upper())
    assert [one.key for one in found.items] == listings()[tool]
    for one in found.items:
        assert (one.outcome in ("mapped", "by_hand")) == bool(one.counterpart)
        assert one.counterpart or one.note
        assert f"\n{one.key} " in found.summary()


def test_steps_count_where_epochs_are_stated_too(tmp_path):
    document = {"num_train_epochs": 3, "max_steps": 1000, "learning_rate": 1e-4}
    _, config = converted(tmp_path, document)
    assert (config.train.steps, config.train.epochs) == (1000, None)
    assert (tmp_path / "my.yaml").read_text().splitlines()[1] == (
        "# num_train_epochs=3 was not converted: train.epochs and train.steps cannot be set "
        "together."
    )
    (tmp_path / "my.yaml").unlink()
    _, config = converted(tmp_path, document | {"max_steps": -1})
    assert (config.train.steps, config.train.epochs) == (None, 3)


def test_a_config_of_deepspeed_is_converted(tmp_path):
    """A key of a section that has no counterpart must not be taken for one of the same name."""
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 8,
                "gradient_accumulation_steps": "auto",
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": "auto"}},
                "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 200}},
                "bf16": {"enabled": True},
                "fp16": {"enabled": False, "loss_scale": 0},
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu", "pin_memory": True},
                    "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
                    "stage3_prefetch_bucket_size": "auto",
                },
                "aio": {"block_size": 1048576},
                "tensor_parallel": {"autotp_size": 2, "dtype": "fp16"},
                "pipeline": {"stages": "auto", "seed_layers": False, "partition": "best"},
                "compile": {"deepcompile": True, "enabled": True},
                "torch_autocast": {"enabled": False, "dtype": "float16"},
                "comet": {"enabled": True, "project": "x"},
                "csv_monitor": {"enabled": True, "output_path": "x"},
                "eigenvalue": {"enabled": False, "verbose": True},
                "progressive_layer_drop": {"enabled": True, "theta": 0.5},
                "wandb": {"enabled": False, "team": "us", "group": "g"},
            }
        )
    )
    made = convert_config(tmp_path / "ds.json", tmp_path / "my.yaml")
    assert read_document(tmp_path / "my.yaml") == {
        "batch": {"rows_per_device": 8},
        "optim": {"kind": "adamw", "lr": 3e-4},
        "schedule": {"kind": "linear", "warmup": 200},
        "train": {"precision": "bf16"},
        "parallel": {"offload": "cpu", "tensor": 2},
    }
    outcomes = {item.key: item.outcome for item in made.items}
    assert outcomes["zero_optimization.stage"] == "by_hand"
    assert outcomes["zero_optimization.offload_param.device"] == "by_hand"
    assert outcomes["aio"] == outcomes["zero_optimization.offload_param.nvme_path"] == "missing"
    assert "unknown" not in outcomes.values()
    notes = {item.key: item.note for item in made.items}
    assert outcomes["csv_monitor"] == outcomes["eigenvalue"] == "unnecessary"
    assert "metrics.jsonl" in notes["csv_monitor"]
    assert notes["eigenvalue"] == "It is off."
    assert notes["compile.enabled"] == "flatout does this by default."
    assert outcomes["progressive_layer_drop"] == "missing"


@pytest.mark.parametrize(
    ("value", "note"), [(True, "flatout does this by default."), (False, "It is off.")]
)
def test_compile_of_deepspeed_needs_nothing(tmp_path, value, note):
    """It is off by default there."""
    found, config = converted(
        tmp_path, {"weight_decay": 0.1, "compile": {"enabled": value, "backend": "x", "kwargs": {}}}
    )
    assert [item.outcome for item in found.items[1:]] == ["unnecessary"] * 3
    assert found.items[1].note == note
    assert config.speedups == "auto"


@pytest.mark.parametrize(
    "secret",
    [
        {"comet": {"project": "a", "api_key": "xyz"}},
        {"plugins": [{"name": "a", "auth-token": "xyz"}]},
        {"WANDB_API_KEY": "xyz"},
        {"hf_token": "xyz"},
        {"hub": {"token": "xyz"}},
        {"headers": {"cookie": "xyz"}, "dataset_url": "https://me:xyz@host/data"},
        {"authorization": "Bearer xyz"},
    ],
    ids=str,
)
def test_secrets_are_not_repeated(secret, tmp_path):
    found, _ = converted(tmp_path, {"learning_rate": 0.1} | secret)
    assert "xyz" not in found.model_dump_json() + (tmp_path / "my.yaml").read_text()


def test_the_next_command_can_be_pasted(old, tmp_path):
    found = convert_config(old, tmp_path / "my recipe.yaml")
    assert f"flatout plan '{tmp_path}/my recipe.yaml'" in found.summary()


def test_a_long_key_is_shown_whole_and_a_long_value_is_cut():
    key = "zero_optimization.stage3_use_all_reduce_for_fetch_params"
    assert Item(key=key, value=True, outcome="unknown").shown() == f"{key}=True"
    assert Item(key=key, value="a b " * 30, outcome="unknown").shown().endswith(" [...]")


def test_the_keys_of_a_tool_exclude_a_config(old, tmp_path):
    for more in ({"config": old}, {"out": tmp_path / "new.yaml"}):
        with pytest.raises(ConfigError, match="--keys and a config cannot be combined"):
            convert_config(keys="nanogpt", **more)
