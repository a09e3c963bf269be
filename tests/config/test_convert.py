"""A config of another tool becomes a recipe, with an answer for each of its keys."""

from __future__ import annotations

import pytest

from flatout.config.convert import convert, read_settings
from flatout.config.registry import RECIPES
from flatout.config.schema import nested, validate
from flatout.config.words import tools
from flatout.errors import ConfigError

NANOGPT = """\
# the recipe for characters of Shakespeare
import time

out_dir = "out-shakespeare-char"
eval_interval = 250
eval_iters = 200
wandb_log = False
wandb_run_name = "mini-gpt" + str(time.time())
dataset = "shakespeare_char"
gradient_accumulation_steps = 5 * 8
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
device = "cpu"
compile = False
"""
TRAINER = {
    "output_dir": "out",
    "max_steps": -1,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "bf16": True,
    "fp16": False,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "warmup_steps": 0,
    "save_strategy": "epoch",
    "eval_strategy": "no",
    "optim": "adamw_bnb_8bit",
    "gradient_checkpointing": True,
    "report_to": ["wandb"],
    "torch_compile": False,
}
TORCHTITAN = """\
[job]
dump_folder = "./outputs"
[metrics]
log_freq = 5
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 8e-4
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.1
[training]
local_batch_size = 8
global_batch_size = 64
seq_len = 2048
max_norm = 0.5
steps = 10
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
context_parallel_degree = 1
[checkpoint]
enable = true
interval = 500
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
[validation]
freq = 5
steps = 10
"""


def converted(document, computed=()):
    found = convert(document, list(computed))
    validate(nested(found.values))
    return found


def from_text(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return converted(*read_settings(path))


def outcomes(found):
    return {item.key: item.outcome for item in found.items}


def shape_of(values):
    return nested(values)["model"]


def test_a_nanogpt_config_is_converted_without_running_it(tmp_path):
    found = from_text(tmp_path, "train.py", NANOGPT)
    assert found.tool.name == "nanoGPT"
    assert found.values == {
        "model.num_layers": 6,
        "model.num_heads": 6,
        "model.d_model": 384,
        "model.dropout": 0.2,
        "model.positions": "learned",
        "model.activation": "gelu_exact",
        "data.path": "data/shakespeare",
        "data.seq_len": 256,
        "batch.rows_per_device": 64,
        "batch.tokens_per_step": 64 * 40 * 256,
        "optim.lr": 1e-3,
        "optim.betas": [0.9, 0.99],
        "schedule.min_lr": 1e-4,
        "schedule.warmup": 100,
        "train.steps": 5000,
        "train.seed": 1337,
        "train.eval_every": 250,
        "train.eval_tokens": 200 * 64 * 256,
        "train.device": "cpu",
        "log.every": 1,
        "speedups": "auto,-compile",
    }
    kinds = outcomes(found)
    assert {key for key, kind in kinds.items() if kind == "unknown"} == {"wandb_run_name"}
    assert kinds["wandb_log"] == kinds["lr_decay_iters"] == kinds["out_dir"] == "unnecessary"
    assert kinds["gradient_accumulation_steps"] == "mapped"
    assert found.defaults == {"log_interval": 1}
    assert found.options == {"SOURCE": "shakespeare", "--tokenizer": "char"}


@pytest.mark.parametrize(
    ("key", "value"), [("use_8bit_optim", False), ("fp16", "no"), ("max_steps", -1)]
)
def test_what_is_off_is_said_to_be_off(key, value):
    (item,) = converted({key: value}).items
    assert (item.outcome, item.becomes, item.why) == ("unnecessary", {}, "It is off.")


def test_defaults_of_the_tool_complete_a_short_config():
    found = converted({"block_size": 512, "max_iters": 100})
    assert found.values["model.num_layers"] == 12
    assert found.values["batch.tokens_per_step"] == 12 * 40 * 512
    assert found.defaults["n_embd"] == 768
    assert "max_iters" not in found.defaults


LITGPT_LORA = {"checkpoint_dir": "c/O/M", "lora_key": False}
TOOLS = {
    "nanoGPT": {"block_size": 64, "max_iters": 9},
    "litgpt": {"model_name": "tiny-llama-1.1b", "tokenizer_dir": "t"},
    "litgpt finetune_full": {"checkpoint_dir": "c/O/M", "train": {"micro_batch_size": 1}},
    "litgpt finetune_lora": LITGPT_LORA,
    "torchtitan": {"training": {"local_batch_size": 2, "seq_len": 64}},
    "Axolotl": {"base_model": "O/M", "sequence_len": 64},
    "Hugging Face Trainer": {"num_train_epochs": 1, "lr_scheduler_type": "cosine"},
    "TRL": {"max_length": 64, "num_train_epochs": 1, "learning_rate": 1e-4},
}
"""Short configs by the tool that they belong to."""
DEFAULTS = {
    # tool: betas, weight decay, clip, min lr, warm-up, schedule, seed, precision, document mask
    "nanoGPT": ((0.9, 0.95), 0.1, 1, 6e-5, 2000, "cosine", 1337, "auto", False),
    "litgpt": ((0.9, 0.999), 0.01, 1, 4e-5, 2000, "cosine", 42, "auto", False),
    "litgpt finetune_full": ((0.9, 0.999), 0.01, 0, 0, 100, "cosine", 1337, "auto", True),
    "litgpt finetune_lora": ((0.9, 0.999), 0.01, 0, 0, 100, "cosine", 1337, "auto", True),
    "torchtitan": ((0.9, 0.95), 0.1, 1, 0, 200, "linear", 0, "auto", False),
    "Axolotl": ((0.9, 0.999), 0, 1, 0, 0.03, "cosine", 42, "auto", True),
    "Hugging Face Trainer": ((0.9, 0.999), 0, 1, 0, 0, "cosine", 42, "fp32", False),
    "TRL": ((0.9, 0.999), 0, 1, 0, 0, "linear", 42, "auto", True),
}
"""What each tool does when a config says nothing, as its source states."""


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("per_device_train_batch_size", -8, "It must be greater than 0."),
        ("max_steps", -5, "It must be greater than 0."),
        ("max_steps", 2.5, "train.steps=2.5 is not valid: it must be a whole number."),
        ("warmup_ratio", 7, "A share of the run is below 1."),
        ("warmup_ratio", 1.0, "A share of the run is below 1."),
        ("warmup_steps", -3, "schedule.warmup=-3 is not valid"),
    ],
)
def test_a_value_that_cannot_be_is_missing_and_leaves_the_others(key, value, why):
    found = converted({"num_train_epochs": 3, "learning_rate": 1e-4, key: value})
    (item,) = (one for one in found.items if one.key == key)
    assert (item.outcome, item.becomes) == ("missing", {})
    assert item.why.startswith(why)
    assert found.values["train.epochs"] == 3


@pytest.mark.parametrize("name", [tool.name for tool in tools()])
def test_what_a_config_omits_is_what_its_tool_does(name):
    found = converted(TOOLS[name])
    assert found.tool.name == name
    config = validate(nested(found.values))
    optim, schedule, train = config.optim, config.schedule, config.train
    values = (optim.betas, optim.weight_decay, optim.clip, schedule.min_lr, schedule.warmup)
    values += (schedule.kind, train.seed, train.precision, config.data.document_mask)
    assert values == DEFAULTS[name]
    assert (optim.eps, config.lora.rank is None) == (1e-8, name != "litgpt finetune_lora")


@pytest.mark.parametrize(
    ("stated", "masked"),
    [
        ({"sample_packing": True}, True),
        ({"sample_packing": False}, True),
        ({"packing": False}, True),
        ({"packing": True}, True),
        ({"packing": True, "packing_strategy": "wrapped"}, False),
        ({"reset_attention_mask": False}, False),
    ],
)
def test_examples_that_do_not_see_each_other_stay_apart(stated, masked):
    assert converted(stated).values["data.document_mask"] is masked


def test_litgpts_fine_tuning_ignores_min_lr_and_does_not_clip():
    train = {"micro_batch_size": 1, "max_norm": None, "min_lr": 6e-5}
    found = converted({"checkpoint_dir": "c/O/M", "train": train})
    assert found.values["optim.clip"] == 0
    assert "schedule.min_lr" not in found.values
    assert outcomes(found)["train.min_lr"] == "unnecessary"


@pytest.mark.parametrize(
    ("stated", "rank", "targets"),
    [
        (LITGPT_LORA | {"lora_r": 32}, 32, ["q", "v"]),
        (LITGPT_LORA | {"lora_mlp": True}, 8, ["q", "v", "gate", "up", "down"]),
        ({"lora_query": False, "lora_key": True, "lora_projection": True}, 8, ["k", "v", "o"]),
        ({"lora_mlp": True, "lora_value": False}, 8, ["q", "gate", "up", "down"]),
        ({"use_peft": True, "packing": False}, 16, ["q", "v"]),
    ],
)
def test_the_layers_with_adapters_are_those_of_the_tool(stated, rank, targets):
    values = converted(stated).values
    assert (values["lora.rank"], values["lora.targets"]) == (rank, targets)


@pytest.mark.parametrize("switch", [{"adapter": None}, {"adapter": ""}, {}])
def test_axolotl_has_no_adapters_without_its_switch(switch):
    found = converted(TOOLS["Axolotl"] | {"lora_r": 8, "lora_alpha": 16} | switch)
    assert not [key for key in found.values if key.startswith("lora.")]
    assert outcomes(found)["lora_r"] == "unnecessary"


@pytest.mark.parametrize(
    ("key", "stated", "off"),
    [
        ("eval_only", True, False),
        ("rl", "dpo", None),
        ("loss_type", "sigmoid", "nll"),
        ("reward_model", True, None),
        ("num_generations", 8, None),
    ],
)
def test_a_config_that_trains_nothing_or_something_else_is_rejected(key, stated, off):
    with pytest.raises(ConfigError, match=key):
        convert(TOOLS["nanoGPT"] | {key: stated}, [])
    assert convert(TOOLS["nanoGPT"] | {key: off}, []).values


def test_a_computed_value_is_not_replaced_by_the_default_of_the_tool():
    assert convert(TOOLS["nanoGPT"], []).values["optim.lr"] == 6e-4
    found = convert(TOOLS["nanoGPT"], ["learning_rate"])
    assert "optim.lr" not in found.values
    assert [item.key for item in found.items].count("learning_rate") == 1


def test_the_trainers_arguments_are_converted():
    found = converted(TRAINER)
    assert found.tool.name == "Hugging Face Trainer"
    expected = {
        "train.epochs": 2,
        "batch.accumulate": 8,
        "train.precision": "bf16",
        "schedule.warmup": 0.1,
        "checkpoint.every_epochs": 1,
        "optim.lr": 5e-5,
        "optim.betas": [0.9, 0.999],
        "speedups": "auto,+adamw-8bit,+checkpointing,-compile",
        "log.to": ["wandb"],
    }
    assert found.values.items() >= expected.items()
    assert not {"train.steps", "checkpoint.every_steps"} & found.values.keys()
    assert set(outcomes(found).values()) == {"mapped", "unnecessary"}


def test_a_torchtitan_config_is_converted(tmp_path):
    found = from_text(tmp_path, "llama.toml", TORCHTITAN)
    assert found.tool.name == "torchtitan"
    expected = {
        "batch.tokens_per_step": 64 * 2048,
        "schedule.kind": "wsd",
        "schedule.decay": 0.8,
        "schedule.min_lr": pytest.approx(8e-5),
        "parallel.shard": 8,
        "optim.clip": 0.5,
        "train.eval_every": 5,
        "train.eval_tokens": 10 * 8 * 2048,
        "checkpoint.every_steps": 500,
        "speedups": "auto,+selective-checkpointing",
    }
    assert {key: found.values[key] for key in expected} == expected
    assert shape_of(found.values) == RECIPES.get("llama-8b")["model"]
    kinds = outcomes(found)
    assert kinds["parallelism.tensor_parallel_degree"] == "mapped"
    assert kinds["parallelism.context_parallel_degree"] == "unnecessary"
    assert "unknown" not in kinds.values()


def test_an_eigenstate_config_is_converted():
    sizes = {
        "dim": 512,
        "n_layers": 6,
        "num_eigenstates": 64,
        "max_seq_len": 2048,
        "chunk_size": 64,
    }
    switches = dict.fromkeys(("tie_weights", "use_gradient_checkpointing", "use_hten"), True)
    missing = dict.fromkeys(("use_resonance", "qk_norm"), True)
    document = sizes | switches | missing | {"hten_scales": [1, 2, 4], "ffn_multiplier": 4.0}
    found = converted(document)
    expected = {
        "model.kind": "eigenstate",
        "model.scales": [1, 2, 4],
        "model.d_ff": 2048,
        "data.seq_len": 2048,
        "speedups": "auto,+checkpointing",
    }
    assert found.values.items() >= expected.items()
    assert {outcomes(found)[key] for key in missing} == {"missing"}
    assert converted(document | {"use_hten": False}).values["model.scales"] == [1]


def test_the_shape_of_gpt_neox_is_converted():
    shape = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 20}
    neox = {"rotary_pct": 0.25, "use_parallel_residual": True, "layer_norm_eps": 1e-6}
    values = converted(shape | neox).values
    assert values["model.rotary_dims"] == 32
    assert values["model.parallel_residual"] is True
    assert values["model.layer_norm_eps"] == 1e-6
    for whole in (shape | {"rotary_pct": 1.0}, {"rotary_pct": 0.25}):
        assert "model.rotary_dims" not in converted(whole).values


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("NousResearch/Llama-3.2-1B", "hf:NousResearch/Llama-3.2-1B"),
        ("gpt2-medium", "hf:openai-community/gpt2-medium"),
        ("out/ckpt.pt", "out/ckpt.pt"),
        ("/models/llama", "/models/llama"),
        ("./model", "./model"),
        ("scratch", None),
        ("resume", None),
    ],
)
def test_models_to_start_from_are_converted(theirs, ours):
    values = converted({"init_from": theirs, "n_layer": 2}).values
    assert values.get("train.init_from") == ours


def test_sections_of_a_litgpt_config_are_read():
    model = {"n_layer": 16, "n_query_groups": 4, "block_size": 4096, "hf_config": {}}
    train = {"global_batch_size": 512, "micro_batch_size": 4, "max_tokens": 10**9}
    found = converted(
        {"model": model, "train": train, "eval": {"interval": 1000, "max_iters": 100}}
    )
    assert found.tool.name == "litgpt"
    assert found.values["batch.tokens_per_step"] == 512 * 4096
    assert found.values["model.max_seq_len"] == found.values["data.seq_len"] == 4096
    assert found.values["train.eval_tokens"] == 100 * 4 * 4096
    assert found.values["train.tokens"] == 10**9


@pytest.mark.parametrize(
    ("epochs", "every", "expected"),
    [
        (
            50,
            5,
            {"train.eval_every": None, "train.eval_every_epochs": 5, "checkpoint.every_epochs": 5},
        ),
        (1, 1000, {"train.eval_every": 1000, "checkpoint.every_steps": 1000}),
    ],
)
def test_intervals_of_a_run_in_epochs_stay_epochs(epochs, every, expected):
    document = {"num_epochs": epochs, "eval_interval": every, "save_interval": every}
    values = converted(document).values
    assert {key: values.get(key) for key in expected} == expected


def test_the_first_of_two_keys_with_one_meaning_wins():
    found = converted({"learning_rate": 1e-3, "base_lr": 2e-3, "lr": 1e-3})
    assert found.values == {"optim.lr": 1e-3}
    assert found.items[1].outcome == "missing"
    assert found.items[1].why == "optim.lr=0.001 is already set."
    assert found.items[2].becomes == {"optim.lr": 1e-3}


def test_the_peak_of_one_cycle_is_the_rate():
    one_cycle = {"learning_rate": 1e-4, "max_lr": 1e-3, "pct_start": 0.1, "anneal_strategy": "cos"}
    found = converted(one_cycle | {"epochs": 2})
    expected = {"optim.lr": 1e-3, "schedule.warmup": 0.1, "schedule.kind": "cosine"}
    assert found.values == expected | {"train.epochs": 2}


def test_keys_that_any_trainer_has_belong_to_no_tool():
    common = {"learning_rate": 1e-4, "logging_steps": 10, "weight_decay": 0.1, "warmup_steps": 5}
    assert converted(common).tool is None


def test_a_length_in_steps_wins_over_epochs():
    found = converted({"num_epochs": 3, "max_steps": 10})
    assert found.values == {"train.steps": 10}
    assert found.items[0].why == "train.steps is set."


def test_invalid_and_unknown_keys_are_listed_and_omitted():
    document = {"learning_rate": "fast", "max_steps": 10, "dtype": "int4", "flux_capacitor": 3}
    found = converted(document | {"hub_token": "hf_abc"})
    assert found.values == {"train.steps": 10}
    assert "must be a number" in found.items[0].why
    assert "There is no precision int4" in found.items[2].why
    assert outcomes(found)["flux_capacitor"] == "unknown"
    assert "hf_abc" not in str(found.items), "secrets are not repeated"
    found = converted({"seq_len": "long", "global_batch_size": 10**15, "lr": 1e-3})
    assert found.values == {"optim.lr": 1e-3}, "text is not multiplied"


def test_several_datasets_need_weights():
    one = converted({"datasets": [{"path": "roneneldan/TinyStories", "type": "completion"}]})
    assert converted({"datasets": ["roneneldan/TinyStories"]}).values == one.values
    assert one.values == {"data.path": "data/tinystories"}
    two = converted({"datasets": [{"path": "a"}, {"path": "b"}], "lr": 1e-3})
    assert "data.mix" in two.items[0].why
    mixed = converted({"blend": {"data/Code": 1, "book": 3}})
    assert mixed.values == {"data.mix": {"data/code": 1, "data/book": 3}}


def test_python_values_are_literals_and_arithmetic(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "batch_size: int = 4 * 2\nblock_size = 2**40\nn_layer = -1 + 3\nout_dir = open('x')\n"
        "n_head = ['a'] * 3\nseed = {1, 2}\n_hidden = 3\n"
    )
    values, computed = read_settings(path)
    assert values == {"batch_size": 8, "n_layer": 2}
    assert computed == ["block_size", "out_dir", "n_head", "seed"]
    found = convert(values, computed)
    assert found.items[-4].why == "It is computed, and code is not executed. Set data.seq_len."


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json is not valid JSON"),
        ("a.toml", "a =", "a.toml is not valid TOML"),
        ("a.py", "a = (", "a.py is not valid Python"),
        ("a.yaml", "- 1", "a.yaml is not a mapping"),
        ("a.yaml", "a: [", "is not valid YAML"),
        ("a.json", "{}", "a.json is not a mapping"),
    ],
)
def test_an_unreadable_config_is_rejected(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_settings(tmp_path / name)
