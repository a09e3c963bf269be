"""Messages for a wrong key or value suggest a key, and state its valid values and its help."""

from __future__ import annotations

import pytest

from flatout.config.schema import load_config
from flatout.config.sections import LogConfig
from flatout.errors import ConfigError


def error_of(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return caught.value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "batch.rows_per_device=foo",
            "batch.rows_per_device='foo' is not valid: it must be a whole number or 'auto'.",
        ),
        (
            "batch.rows_per_device=0",
            "batch.rows_per_device=0 is not valid: it must be at least 1 or 'auto'.",
        ),
        (
            "batch.rows_per_device=1.5",
            "batch.rows_per_device=1.5 is not valid: it must be a whole number or 'auto'.",
        ),
        ("optim.lr=fast", "optim.lr='fast' is not valid: it must be a number."),
        ("optim.lr=-1", "optim.lr=-1 is not valid: it must be more than 0."),
        ("optim.lr=", "optim.lr=None is not valid: it must be a number."),
        ("optim.lr=.inf", "optim.lr=inf is not valid: it must be a finite number."),
        ("optim.lr=nan", "optim.lr='nan' is not valid: it must be a finite number."),
        ("optim.betas=0.9", "optim.betas=0.9 is not valid: it must be a list."),
        ("optim.betas=[0.9]", "optim.betas=[0.9] is not valid: it must be a longer list."),
        (
            "optim.betas=[0.9,0.9,0.9]",
            "optim.betas=[0.9, 0.9, 0.9] is not valid: it must be a shorter list.",
        ),
        ("optim.momentum=1", "optim.momentum=1 is not valid: it must be less than 1."),
        ("optim=3", "optim=3 is not valid: optim is a section."),
        ("optim.lr.x=3", "optim.lr={'x': 3} is not valid: it must be a number."),
        ("schedule.decay=2", "schedule.decay=2 is not valid: it must be at most 1."),
        (
            "train.precision=bf32",
            "train.precision='bf32' is not valid: it must be 'auto', 'fp32', 'fp16' or 'bf16'.",
        ),
        ("train.steps=10.5", "train.steps=10.5 is not valid: it must be a whole number."),
        ("train.tokens=10M", "train.tokens='10M' is not valid: it must be a whole number."),
        (
            "train.deterministic=maybe",
            "train.deterministic='maybe' is not valid: it must be true or false.",
        ),
        ("speedups=3", "speedups=3 is not valid: it must be text or a list."),
        ("speedups=false", "speedups=False is not valid: it must be text or a list."),
        ("optim.lr=true", "optim.lr=True is not valid: it must be a number."),
        ("lora=false", "lora=False is not valid: lora is a section."),
        (
            "batch.rows_per_device=true",
            "batch.rows_per_device=True is not valid: it must be a whole number or 'auto'.",
        ),
        (
            "schedule.warmup=1.5",
            "schedule.warmup=1.5 is neither a number of steps nor a fraction of the run.",
        ),
        ("optim.betas=[0.9,1.5]", "optim.betas=[0.9, 1.5] must be in [0, 1)."),
        ("schedule.min_lr=1", "schedule.min_lr=1 is above optim.lr=0.001."),
        (
            "format_version=9",
            "This config has format_version 9; this version of flatout reads up to 1.",
        ),
        ("optim", "'optim' is not an override."),
        ("=3", "'=3' is not an override."),
    ],
)
def test_the_message_states_the_valid_values(override, message):
    assert error_of(override).what == message


def test_help_of_several_lines_is_one_line():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["train.devices=two"])
    assert caught.value.fix.endswith("None means one, or as many as torchrun starts.")
    assert "\\n" not in caught.value.fix


def test_the_fix_contains_the_default_and_the_help():
    assert error_of("data.prefetch=0").fix == (
        "Change it, or leave it at its default, 4. data.prefetch: Optimizer steps that the "
        "feed reads ahead."
    )
    assert error_of("optim.betas=1").fix.startswith(
        "Change it, or leave it at its default, [0.9, 0.95]."
    )
    assert error_of("train.steps=x").fix.startswith(
        "Change it, or leave it out. train.steps: Optimizer steps."
    )


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train.stepz", "train.steps"),
        ("lr", "optim.lr"),
        ("train.lr", "optim.lr"),
        ("steps", "train.steps"),
        ("modle.num_layers", "model"),
        ("optm.lr", "optim"),
        ("speedup", "speedups"),
        ("data.seqlen", "data.seq_len"),
        ("train.batch_size", "batch.rows_per_device"),
        ("learning_rate", "optim.lr"),
        ("gradient-accumulation-steps", "batch.accumulate"),
        ("train.Max_Grad_Norm", "optim.clip"),
        ("save_steps", "checkpoint.every_steps"),
        ("use_compile", "speedups"),
        ("n_layer", "model.num_layers"),
        ("checkpoint.every", "checkpoint.every_steps"),
        ("data.len", "data.seq_len"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key, expected):
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
        ("use_hten=false", "Did you mean 'model.scales'? Write model.scales=[1]."),
    ],
)
def test_a_switch_that_is_off_is_answered_as_off(override, fix):
    assert error_of(override).fix == fix


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
    assert error.what == f"There is no config key {key!r}; other tools have {word!r}."
    assert error.fix.startswith(expected)


def test_a_key_without_a_near_match_lists_its_section():
    known = ", ".join(f"log.{name}" for name in LogConfig.model_fields)
    assert error_of("log.qqqqqqqq=1").fix == f"Known keys: {known}."


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("train.precision=no", "Did you mean train.precision=fp32? train.precision: "),
        ("train.precision=bf16-mixed", "Did you mean train.precision=bf16? "),
        ("speedups=false", "Did you mean speedups=none? "),
    ],
)
def test_another_tools_value_is_answered_with_flatouts(override, fix):
    assert error_of(override).fix.startswith(fix)
