"""What a command may change when a run resumes: what was asked and stored, and what results."""

import pytest
from fakes import fake_checkpoint

from flatout.config.schema import load_config
from flatout.errors import ConfigError
from flatout.training.run_dir import layout
from flatout.training.run_dir.resume import config_to_resume, keys_that_may_change

LR = ["train.steps=10", "optim.lr=0.001"]
AUTO = ["train.epochs=2", "speedups=auto,-compile"]
CHOSEN = {"train.steps": 40, "speedups": ("bf16",)}
BATCH = ["batch.tokens_per_step=2048"]
TWO_OF_FOUR = {"batch.rows_per_device": 4, "batch.accumulate": 2}
"""The micro-batch that was chosen for sequences of 256 tokens."""
FOUR_OF_TWO = {"batch.rows_per_device": 2, "batch.accumulate": 4}
FREE = ["log.every=2", "checkpoint.keep_every=5", "train.patience=3", "checkpoint.every_steps=4"]

TABLE = {
    # name: (what was asked first, what it resolved to, what is asked now, the values or the error)
    "a contradiction": (LR, {}, ["optim.lr=0.01"], r"optim\.lr: 0\.001 -> 0\.01.*Fix.*--run-dir"),
    "the same": (LR, {}, LR, {"optim.lr": 0.001, "train.steps": 10}),
    "free keys, and others that are not stated": (
        ["checkpoint.every_minutes=5", "batch.rows_per_device=4", "name=old"], {},
        ["checkpoint.every_steps=3", "log.every=2", "name=new"],
        {"checkpoint.every_steps": 3, "checkpoint.every_minutes": None, "log.every": 2,
         "batch.rows_per_device": 4, "name": "old"},
    ),
    "free keys that are omitted": (
        [*FREE, "parallel.shard=2"], {}, [],
        {"log.every": 2, "checkpoint.keep_every": 5, "train.patience": 3,
         "checkpoint.every_steps": 4, "parallel.shard": 1},  # each start states how work is shared
    ),
    "free keys that are unset or replaced": (
        FREE, {}, ["log.every=10", "checkpoint.keep_every=null", "checkpoint.every_minutes=1"],
        {"log.every": 10, "checkpoint.keep_every": None, "train.patience": 3,
         "checkpoint.every_steps": None, "checkpoint.every_minutes": 1},
    ),
    "a key that is unset": (
        [*LR, "model.window=8"], {}, [*LR, "model.window=null"], r"model\.window: 8 -> None",
    ),
    "adapters that are unset": (
        [*LR, "lora.rank=8"], {}, [*LR, "lora.rank=null"], r"lora\.rank: 8 -> None",
    ),
    "a key that was never set": (
        LR, {"model.vocab_size": 65}, [*LR, "model.vocab_size=null"], {"model.vocab_size": 65},
    ),
    "what auto chose": (AUTO, CHOSEN, AUTO, CHOSEN),
    "another length, which is checked later": (
        AUTO, CHOSEN, ["train.epochs=3", "speedups=auto,-compile"], CHOSEN,
    ),
    "not what auto chose": (AUTO, CHOSEN, ["train.epochs=2", "speedups=none"], "speedups"),
    "the micro-batch that was chosen": (BATCH, TWO_OF_FOUR, BATCH, TWO_OF_FOUR),
    "other rows": (BATCH, TWO_OF_FOUR, [*BATCH, "batch.rows_per_device=2"], FOUR_OF_TWO),
    "another micro-batch": (
        BATCH, TWO_OF_FOUR, ["batch.rows_per_device=2", "batch.accumulate=4"], FOUR_OF_TWO,
    ),
    "another number": (BATCH, TWO_OF_FOUR, [*BATCH, "batch.accumulate=4"], FOUR_OF_TWO),
    "rows that do not divide": (
        BATCH, TWO_OF_FOUR, [*BATCH, "batch.rows_per_device=3"], r"batch\.",
    ),
    "a smaller step": (
        BATCH, TWO_OF_FOUR, ["batch.rows_per_device=2", "batch.accumulate=2"], r"batch\.",
    ),
    "a larger step": (
        BATCH, TWO_OF_FOUR, ["batch.tokens_per_step=4096", "batch.rows_per_device=2"], r"batch\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("first", "resolved", "asked", "answer"), TABLE.values(), ids=TABLE)
def test_what_a_resume_takes_over(first, resolved, asked, answer, tmp_path):
    requested = load_config(None, first)
    layout.write_config(tmp_path, requested.with_values(resolved), requested=requested)
    fake_checkpoint(tmp_path, 5)
    if isinstance(answer, dict):
        config = config_to_resume(tmp_path, load_config(None, asked))
        assert {key: config.value(key) for key in answer} == answer
        return
    with pytest.raises(ConfigError, match=answer) as refused:
        config_to_resume(tmp_path, load_config(None, asked))
    assert refused.value.fix.endswith(keys_that_may_change())


def test_what_a_recipe_states_counts_as_stated(tmp_path):
    layout.write_config(tmp_path, load_config(None, ["log.every=2"]))
    fake_checkpoint(tmp_path, 5)
    recipe = tmp_path / "own.yaml"
    recipe.write_text("log: {every: 7}\n")
    assert config_to_resume(tmp_path, load_config(recipe)).log.every == 7


def test_a_config_keeps_what_was_stated_when_values_are_replaced():
    config = load_config(None, ["model.own=3", "log.every=10"]).with_values({"optim.lr": 1.0})
    assert config.stated() == {"model.own", "log.every", "optim.lr"}
    assert config.model.own() == {"own": 3}
