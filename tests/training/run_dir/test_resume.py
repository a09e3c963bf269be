"""How a run resumes: its configuration, its checkpoint and its origin."""

import shutil

import pytest
from fakes import Recorder, fake_checkpoint

from flatout.config.schema import RunConfig, load_config
from flatout.errors import CheckpointError, ConfigError
from flatout.training.run_dir import layout
from flatout.training.run_dir.lock import hold_lock
from flatout.training.run_dir.resume import config_to_resume, keys_that_may_change, resume_from


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


def test_a_missing_request_is_named_where_it_would_have_been_compared(tmp_path):
    asked = load_config(None, ["speedups=auto,-compile"])
    layout.write_config(tmp_path, asked.with_values({"speedups": ["bf16"]}), requested=asked)
    fake_checkpoint(tmp_path, 5)
    config_to_resume(tmp_path, asked)
    (tmp_path / "asked.yaml").unlink()
    with pytest.raises(ConfigError) as refused:
        config_to_resume(tmp_path, asked)
    assert refused.value.what.endswith(
        f"{tmp_path / 'asked.yaml'}, with the settings as requested, is missing."
    )
    assert refused.value.fix.startswith(f"Restore {tmp_path / 'asked.yaml'} if there is a copy. ")


def test_an_empty_directory_has_no_stored_configuration(tmp_path):
    assert config_to_resume(tmp_path, RunConfig()) is None
    assert layout.read_config(tmp_path) is None


def test_a_start_that_never_saved_does_not_bind_the_next_one(tmp_path):
    layout.write_config(tmp_path, load_config(None, ["optim.lr=0.001"]))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "checkpoints" / "step-5.tmp-aa").mkdir(parents=True)
    assert config_to_resume(tmp_path, load_config(None, ["optim.lr=0.01"])) is None


@pytest.mark.parametrize("left", ["step-5", "step-5.tmp-old-aa", "step-5.aside-aa"])
def test_a_run_that_has_saved_keeps_its_configuration(tmp_path, left):
    layout.write_config(tmp_path, load_config(None, ["optim.lr=0.001"]))
    (tmp_path / "checkpoints" / left).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        config_to_resume(tmp_path, load_config(None, ["optim.lr=0.01"]))


def test_a_finished_run_without_checkpoints_keeps_its_configuration(tmp_path):
    layout.write_config(tmp_path, load_config(None, ["optim.lr=0.001"]))
    layout.write_summary(tmp_path, {})
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        config_to_resume(tmp_path, load_config(None, ["optim.lr=0.01"]))


def test_resume_auto_takes_the_newest_complete_checkpoint_and_reports_skipped_ones(tmp_path):
    first = fake_checkpoint(tmp_path, 5)
    second = fake_checkpoint(tmp_path, 12)
    recorder = Recorder()
    assert resume_from(tmp_path, "auto", progress=recorder) == second
    assert recorder.lines == []
    (second / "state.json").write_bytes(b"y")
    assert resume_from(tmp_path, "auto", progress=recorder) == first
    assert "step-12" in recorder.lines[0]
    assert "state.json is damaged" in recorder.lines[0]


def test_resume_auto_starts_in_an_empty_directory(tmp_path):
    assert resume_from(tmp_path / "none") is None
    assert resume_from(tmp_path) is None


def test_resume_auto_never_starts_over_on_its_own(tmp_path):
    (fake_checkpoint(tmp_path, 5) / "state.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"No checkpoint .* is complete.*state\.json is missing"
    ):
        resume_from(tmp_path)


def test_resume_auto_deletes_the_leftovers_of_killed_saves(tmp_path):
    whole = fake_checkpoint(tmp_path, 5)
    (tmp_path / "checkpoints" / "step-7.tmp-ab12").mkdir()
    (tmp_path / "checkpoints" / "step-7.tmp-ab12" / "model").write_text("half")
    recorder = Recorder()
    assert resume_from(tmp_path, progress=recorder) == whole
    assert recorder.lines == ["Removed step-7.tmp-ab12, left by a save that was killed."]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-5"]


def test_a_checkpoint_whose_replacement_was_killed_is_restored(tmp_path):
    whole = fake_checkpoint(tmp_path, 5)
    whole.rename(whole.with_name("step-5.tmp-old-aa"))
    (tmp_path / "checkpoints" / "step-5.tmp-bb").mkdir()
    assert resume_from(tmp_path) == whole
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-5"]


def test_resume_never_rejects_a_directory_that_is_not_empty(tmp_path):
    with hold_lock(tmp_path):
        assert resume_from(tmp_path, "never") is None
    assert resume_from(tmp_path / "none", "never") is None
    layout.write_config(tmp_path, RunConfig())
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        resume_from(tmp_path, "never")


def test_resume_from_a_path_takes_a_checkpoint_or_a_run(tmp_path):
    path = fake_checkpoint(tmp_path / "other", 5)
    assert resume_from(tmp_path / "new", str(path)) == path
    assert resume_from(tmp_path / "new", str(tmp_path / "other")) == path
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        resume_from(tmp_path / "new", str(path))


@pytest.mark.parametrize("asked", ["old", "old/checkpoints/step-10"])
def test_the_same_resume_from_elsewhere_continues_the_run_it_started(tmp_path, asked):
    origin, new, recorder = fake_checkpoint(tmp_path / "old", 10), tmp_path / "new", Recorder()
    new.mkdir()
    for _ in range(2):
        assert resume_from(new, str(tmp_path / asked), progress=recorder) == origin
    own = fake_checkpoint(new, 25)
    assert recorder.lines == []
    assert resume_from(new, str(tmp_path / asked), progress=recorder) == own
    assert "Resuming from step-25" in recorder.lines[0]
    shutil.rmtree(tmp_path / "old")
    assert resume_from(new, str(tmp_path / asked)) == own
    assert resume_from(new) == own


def test_another_origin_starts_another_branch(tmp_path):
    new = tmp_path / "new"
    first, second = (
        fake_checkpoint(tmp_path / "one", 10),
        fake_checkpoint(tmp_path / "two", 12, b"2"),
    )
    assert resume_from(new, str(first)) == first
    fake_checkpoint(new, 25)
    for _ in range(2):
        assert resume_from(new, str(second)) == second
    recorder = Recorder()
    assert resume_from(new, progress=recorder) == second
    assert "where this run started" in recorder.lines[0]
    shutil.rmtree(new / "checkpoints")
    own = fake_checkpoint(new, 25, b"of another branch")
    assert resume_from(new, str(second)) == own


def test_a_run_killed_before_its_first_save_resumes_from_its_origin(tmp_path):
    origin, new, recorder = fake_checkpoint(tmp_path / "old", 10), tmp_path / "new", Recorder()
    resume_from(new, str(tmp_path / "old"))
    fake_checkpoint(tmp_path / "old", 20)
    assert resume_from(new, progress=recorder) == origin
    assert str(new / "origin.json") in recorder.lines[0]
    shutil.rmtree(origin)
    with pytest.raises(
        CheckpointError,
        match=r"started from .*step-10, which no longer exists.*delete .*origin\.json",
    ):
        resume_from(new)
    (new / "origin.json").unlink()
    assert resume_from(new) is None


def test_a_runs_own_earlier_checkpoint_is_not_an_origin(tmp_path):
    early, late = fake_checkpoint(tmp_path, 5), fake_checkpoint(tmp_path, 10)
    assert resume_from(tmp_path, str(early)) == early
    assert resume_from(tmp_path, str(tmp_path)) == late
    assert not (tmp_path / "origin.json").exists()


def test_resume_from_a_path_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        resume_from(tmp_path, str(tmp_path / "missing"))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        resume_from(tmp_path, str(tmp_path))
    (tmp_path / "bare" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        resume_from(tmp_path, str(tmp_path / "bare"))
