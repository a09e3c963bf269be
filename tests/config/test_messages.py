"""Messages for a wrong key or value suggest a key, and state its valid values and its help."""

import pytest

from flatout.config.schema import load_config
from flatout.config.sections import LogConfig
from flatout.errors import ConfigError


def error_of(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return caught.value


@pytest.mark.parametrize(
    ("override", "value", "rule"),
    [
        ("batch.rows_per_device=foo", "'foo'", "a whole number or 'auto'"),
        ("batch.rows_per_device=0", "0", "at least 1 or 'auto'"),
        ("batch.rows_per_device=1.5", "1.5", "a whole number or 'auto'"),
        ("batch.rows_per_device=true", "True", "a whole number or 'auto'"),
        ("optim.lr=fast", "'fast'", "a number"),
        ("optim.lr=-1", "-1", "more than 0"),
        ("optim.lr=", "None", "a number"),
        ("optim.lr=true", "True", "a number"),
        ("optim.lr=.inf", "inf", "a finite number"),
        ("optim.lr=nan", "'nan'", "a finite number"),
        ("optim.betas=0.9", "0.9", "a list"),
        ("optim.betas=[0.9]", "[0.9]", "a longer list"),
        ("optim.betas=[0.9,0.9,0.9]", "[0.9, 0.9, 0.9]", "a shorter list"),
        ("optim.momentum=1", "1", "less than 1"),
        ("schedule.decay=2", "2", "at most 1"),
        ("train.precision=bf32", "'bf32'", "'auto', 'fp32', 'fp16' or 'bf16'"),
        ("train.steps=10.5", "10.5", "a whole number"),
        ("train.tokens=10M", "'10M'", "a whole number"),
        ("train.deterministic=maybe", "'maybe'", "true or false"),
        ("speedups=3", "3", "text or a list"),
        ("speedups=false", "False", "text or a list"),
    ],
)
def test_the_message_states_the_valid_values(override, value, rule):
    key = override.partition("=")[0]
    assert error_of(override).what == f"{key}={value} is not valid: it must be {rule}."


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim=3", "optim=3 is not valid: optim is a section."),
        ("lora=false", "lora=False is not valid: lora is a section."),
        ("optim.lr.x=3", "optim.lr={'x': 3} is not valid: it must be a number."),
        ("schedule.warmup=1.5", "1.5 is neither a number of steps nor a fraction of the run."),
        ("optim.betas=[0.9,1.5]", "optim.betas=[0.9, 1.5] must be in [0, 1)."),
        ("schedule.min_lr=1", "schedule.min_lr=1 is above optim.lr=0.001."),
        ("format_version=9", "has format_version 9. This version of flatout reads up to 1."),
    ],
)
def test_what_contradicts_is_named(override, message):
    assert message in error_of(override).what


@pytest.mark.parametrize(
    ("override", "start", "end"),
    [
        ("data.prefetch=0", "Change it, or leave it at its default, 4. data.prefetch: ", "ahead."),
        ("optim.betas=1", "Change it, or leave it at its default, [0.9, 0.95].", ""),
        ("train.steps=x", "Change it, or remove it. train.steps: Optimizer steps.", ""),
        ("train.devices=two", "", "None means one, or as many as torchrun starts."),
    ],
)
def test_the_fix_contains_the_default_and_the_help(override, start, end):
    fix = error_of(override).fix
    assert fix.startswith(start)
    assert fix.endswith(end)
    assert "\\n" not in fix


@pytest.mark.parametrize(
    ("expected", "keys"),
    [
        ("train.steps", ["train.stepz", "steps"]),
        ("optim.lr", ["lr", "train.lr", "learning_rate"]),
        ("model", ["modle.num_layers"]),
        ("optim", ["optm.lr"]),
        ("speedups", ["speedup", "use_compile"]),
        ("data.seq_len", ["data.seqlen", "data.len"]),
        ("batch.rows_per_device", ["train.batch_size"]),
        ("batch.accumulate", ["gradient-accumulation-steps"]),
        ("optim.clip", ["train.Max_Grad_Norm"]),
        ("checkpoint.every_steps", ["save_steps", "checkpoint.every"]),
        ("model.num_layers", ["n_layer"]),
    ],
)
def test_an_unknown_key_suggests_the_nearest(expected, keys):
    for key in keys:
        error = error_of(f"{key}=1")
        assert error.what.startswith("There is no config key ")
        assert error.fix.startswith(f"Did you mean {expected!r}?")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("bf16=false", "Did you mean 'train.precision'? Write train.precision=fp32."),
        ("bf16=true", "Did you mean 'train.precision'? train.precision=bf16."),
        ("wandb=false", "Leave it out: it is off unless log.to asks for it."),
        ("wandb.enabled=false", "Leave it out: it is off unless log.to asks for it."),
        ("use_cpu=no", "Leave it out: it is off unless train.device asks for it."),
        ("no_compile=false", "Leave it out: it is off unless speedups asks for it."),
        ("compile=false", "Did you mean 'speedups'? Write speedups=auto,-compile."),
        ("tensorboard=off", "Did you mean 'log.to'? Write log.to=none."),
        ("packing=false", "Did you mean 'data.document_mask'? Write data.document_mask=true."),
        ("mixed_precision=no", "Did you mean 'train.precision'? Write train.precision=fp32."),
        ("train.precision=no", "Did you mean train.precision=fp32? train.precision: "),
        ("train.precision=bf16-mixed", "Did you mean train.precision=bf16? "),
        ("speedups=false", "Did you mean speedups=none? "),
    ],
)
def test_a_switch_or_value_of_another_tool_is_answered_with_flatouts(override, fix):
    assert error_of(override).fix.startswith(fix)


@pytest.mark.parametrize(
    ("key", "word", "expected"),
    [
        ("gradient_clp", "gradient_clip", "Did you mean 'optim.clip'?"),
        ("num_layerz", "num_layers", "Did you mean 'model.num_layers'?"),
        ("pin_memmory", "pin_memory", "Leave it out: tokens go to a GPU"),
    ],
)
def test_a_misspelt_word_of_another_tool_is_answered_with_its_counterpart(key, word, expected):
    error = error_of(f"{key}=1")
    assert error.what == f"There is no config key {key!r}. Other tools have {word!r}."
    assert error.fix.startswith(expected)


def test_a_key_without_a_near_match_lists_its_section():
    known = ", ".join(f"log.{name}" for name in LogConfig.model_fields)
    assert error_of("log.qqqqqqqq=1").fix == f"Known keys: {known}."


def test_all_unknown_keys_are_answered_at_once(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("optim: {lrr: 3, weight_decya: 0.1}\ntrain: {stepz: 4}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(recipe)
    keys = "optim.lrr, optim.weight_decya, train.stepz"
    assert refused.value.what == f"{recipe}: There are no config keys {keys}."
    for answer in (
        "optim.lrr: Did you mean 'optim.lr'?",
        "optim.weight_decya: Did you mean 'optim.weight_decay'?",
        "train.stepz: Did you mean 'train.steps'?",
    ):
        assert answer in refused.value.fix
    with pytest.raises(ConfigError, match=r"no config keys data\.pth, log\.evry\."):
        load_config(None, ["data.pth=x", "log.evry=3"])


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("train.steps: 10", "train: {steps: 10}"),
        ("log.tags: [a, b]", 'log: {tags: ["a", "b"]}'),
        ("train.deterministic: true", "train: {deterministic: true}"),
        ("optim.lr: 3e-4", "optim: {lr: 0.0003}"),
        ("train.device: cpu", 'train: {device: "cpu"}'),
        ("optim: {lr: 1}\ntrain.steps: 10\nlog.every: 5", "train: {steps: 10}`. log.every"),
    ],
)
def test_a_dotted_key_of_a_recipe_is_answered_with_its_section(tmp_path, line, written):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{line}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(recipe)
    assert written in refused.value.fix
    assert "Did you mean" not in refused.value.fix
    if "\n" not in line:
        recipe.write_text(f"{written}\n")
        load_config(recipe)
