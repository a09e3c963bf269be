"""What a command may change when a run resumes."""

import pytest
from fakes import fake_checkpoint

from flatout.config.schema import RunConfig, load_config
from flatout.errors import ConfigError
from flatout.training.run_dir import layout
from flatout.training.run_dir.resume import config_to_resume, keys_that_may_change


def test_resume_rejects_and_names_a_contradiction_and_the_keys_that_may_change(tmp_path):
    layout.write_config(tmp_path, load_config(None, ["train.steps=10", "optim.lr=0.001"]))
    fake_checkpoint(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.001 -> 0\.01.*Fix.*--run-dir") as refused:
        config_to_resume(tmp_path, load_config(None, ["train.steps=10", "optim.lr=0.01"]))
    assert refused.value.fix.endswith(keys_that_may_change())


def test_free_keys_come_from_the_request_and_the_rest_from_the_stored_configuration(tmp_path):
    stored = load_config(
        None,
        ["train.steps=10", "checkpoint.every_minutes=5", "batch.rows_per_device=4", "name=old"],
    )
    layout.write_config(tmp_path, stored)
    fake_checkpoint(tmp_path, 5)
    config = config_to_resume(
        tmp_path,
        load_config(
            None, ["train.steps=10", "checkpoint.every_steps=3", "log.every=2", "name=new"]
        ),
    )
    assert config.checkpoint.every_steps == 3
    assert config.checkpoint.every_minutes is None
    assert config.log.every == 2
    assert config.batch.rows_per_device == 4
    assert config.name == "old"


def test_what_a_second_command_omits_stays_as_the_run_had_it(tmp_path):
    first = [
        "log.every=2",
        "checkpoint.keep_every=5",
        "train.patience=3",
        "checkpoint.every_steps=4",
    ]
    layout.write_config(tmp_path, load_config(None, [*first, "parallel.shard=2"]))
    fake_checkpoint(tmp_path, 5)
    config = config_to_resume(tmp_path, load_config(None, []))
    assert (config.log.every, config.checkpoint.keep_every, config.train.patience) == (2, 5, 3)
    assert config.checkpoint.every_steps == 4
    assert config.parallel.shard == 1  # each start states how its processes share the work
    stated = ["log.every=10", "checkpoint.keep_every=null", "checkpoint.every_minutes=1"]
    config = config_to_resume(tmp_path, load_config(None, stated))
    assert (config.log.every, config.checkpoint.keep_every, config.train.patience) == (10, None, 3)
    assert (config.checkpoint.every_steps, config.checkpoint.every_minutes) == (None, 1)
    recipe = tmp_path / "own.yaml"
    recipe.write_text("log: {every: 7}\n")
    assert config_to_resume(tmp_path, load_config(recipe)).log.every == 7


def test_a_config_keeps_what_was_stated_when_values_are_replaced():
    config = load_config(None, ["model.own=3", "log.every=10"]).with_values({"optim.lr": 1.0})
    assert config.stated() == {"model.own", "log.every", "optim.lr"}
    assert config.model.own() == {"own": 3}


def test_keys_left_open_keep_their_stored_values(tmp_path):
    layout.write_config(tmp_path, load_config(None, ["checkpoint.every_steps=3"]))
    fake_checkpoint(tmp_path, 5)
    assert config_to_resume(tmp_path, RunConfig()).checkpoint.every_steps == 3


def test_a_repeated_request_does_not_contradict_what_auto_chose(tmp_path):
    asked = load_config(None, ["train.epochs=2", "speedups=auto,-compile"])
    resolved = asked.with_values({"train.steps": 40, "speedups": ["bf16"]})
    layout.write_config(tmp_path, resolved, requested=asked)
    fake_checkpoint(tmp_path, 5)
    assert config_to_resume(tmp_path, asked) == resolved
    assert (
        config_to_resume(tmp_path, asked.with_values({"train.epochs": 3})) == resolved
    )  # the length is checked later, with the dataset
    with pytest.raises(ConfigError, match=r"speedups"):
        config_to_resume(tmp_path, asked.with_values({"speedups": "none"}))


TWO_OF_FOUR = {
    "batch.tokens_per_step": 2048,
    "batch.rows_per_device": 4,
    "batch.accumulate": 2,
}
"""The resolved batch of a run with sequences of 256 tokens."""


@pytest.mark.parametrize(
    "stated",
    [
        ["batch.tokens_per_step=2048", "batch.rows_per_device=2"],
        ["batch.rows_per_device=2", "batch.accumulate=4"],
        ["batch.tokens_per_step=2048", "batch.accumulate=4"],
    ],
)
def test_another_micro_batch_is_accepted_if_a_step_keeps_its_tokens(tmp_path, stated):
    asked = load_config(None, ["batch.tokens_per_step=2048"])
    layout.write_config(tmp_path, asked.with_values(TWO_OF_FOUR), requested=asked)
    fake_checkpoint(tmp_path, 5)
    batch = config_to_resume(tmp_path, load_config(None, stated)).batch
    assert (batch.rows_per_device, batch.accumulate, batch.tokens_per_step) == (2, 4, 2048)
    kept = config_to_resume(tmp_path, asked).batch
    assert (kept.rows_per_device, kept.accumulate) == (4, 2)


@pytest.mark.parametrize(
    "stated",
    [
        ["batch.tokens_per_step=2048", "batch.rows_per_device=3"],
        ["batch.rows_per_device=2", "batch.accumulate=2"],
        ["batch.tokens_per_step=4096", "batch.rows_per_device=2"],
    ],
)
def test_a_micro_batch_that_changes_the_step_is_rejected(tmp_path, stated):
    asked = load_config(None, ["batch.tokens_per_step=2048"])
    layout.write_config(tmp_path, asked.with_values(TWO_OF_FOUR), requested=asked)
    fake_checkpoint(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"batch\."):
        config_to_resume(tmp_path, load_config(None, stated))
