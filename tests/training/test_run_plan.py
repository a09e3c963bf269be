"""The plan for a run directory and a request: a new run, a resume, a summary or a refusal."""

from __future__ import annotations

import shutil

import pytest

from flatout.errors import CheckpointError, ConfigError, Stopped
from flatout.inference.load import load_run
from flatout.training.checkpoint.read_write import read_weights
from flatout.training.run import run_training

pytestmark = pytest.mark.slow


def test_a_finished_run_returns_its_summary_and_does_nothing(tiny_config, tmp_path):
    first = run_training(tiny_config(), tmp_path / "run")
    before = (tmp_path / "run" / "events.jsonl").read_text()
    assert run_training(tiny_config(), tmp_path / "run") == first
    assert (tmp_path / "run" / "events.jsonl").read_text() == before


def test_other_settings_for_a_stored_run_are_refused_with_the_difference(tiny_config, tmp_path):
    run_training(tiny_config(), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.01 -> 0\.02"):
        run_training(tiny_config(optim__lr=0.02), tmp_path / "run")


def test_resume_never_refuses_a_directory_with_a_run(tiny_config, tmp_path):
    run_training(tiny_config(), tmp_path / "run")
    with pytest.raises(CheckpointError, match="never would overwrite"):
        run_training(tiny_config(), tmp_path / "run", resume="never")


@pytest.mark.parametrize("steps", [2, 3])
def test_a_checkpoint_past_the_last_step_of_a_new_run_is_refused(steps, tiny_config, tmp_path):
    run_training(tiny_config(train__steps=3), tmp_path / "first")
    config, other = tiny_config(train__steps=steps), tmp_path / "runs" / "second"
    message = f"step-3 is at step 3, and this run has {steps} steps"
    with pytest.raises(ConfigError, match=message) as refused:
        run_training(config, other, resume=str(tmp_path / "first"))
    assert "train.steps to more than 3" in refused.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_run_that_resumes_another_trains_at_its_own_rate(tiny_config, tmp_path, records):
    run_training(tiny_config(train__steps=3), tmp_path / "first")
    constant = {"schedule__kind": "constant", "schedule__warmup": 0}
    config = tiny_config(train__steps=6, optim__lr=1e-12, **constant)
    run_training(config, tmp_path / "second", resume=str(tmp_path / "first"))
    assert {r["train/lr"] for r in records(tmp_path / "second") if "train/lr" in r} == {1e-12}
    before = read_weights(tmp_path / "first/checkpoints/step-3")
    after = read_weights(tmp_path / "second/checkpoints/step-6")
    assert max(float((after[name] - before[name]).abs().max()) for name in before) < 1e-10


def test_a_checkpoint_that_does_not_fit_leaves_no_run_directory(tiny_config, tmp_path):
    run_training(tiny_config(optim__kind="muon"), tmp_path / "first")
    config, other = tiny_config(train__steps=7), tmp_path / "runs" / "second"
    with pytest.raises(CheckpointError, match=r"train\.init_from") as refused:
        run_training(config, other, resume=str(tmp_path / "first"))
    assert refused.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_directory_with_other_files_is_refused(tiny_config, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not a run directory; it contains notes\.txt"):
        run_training(tiny_config(), tmp_path)
    assert not (tmp_path / "config.yaml").exists()


def test_a_run_resumes_on_moved_data(tiny_config, tiny_set, tmp_path, stop_at, events):
    whole = run_training(tiny_config(), tmp_path / "whole")
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(tiny_set, before)
    with pytest.raises(Stopped):
        run_training(tiny_config(data__path=str(before)), tmp_path / "run", observers=[stop_at(3)])
    before.rename(after)
    moved = run_training(tiny_config(data__path=str(after)), tmp_path / "run")
    assert moved["weights_sha256"] == whole["weights_sha256"]
    assert events(tmp_path / "run", "difference") == []
    assert load_run(tmp_path / "run").dataset.path == after
    assert run_training(tiny_config(data__path=str(after)), tmp_path / "run") == moved


def test_changed_data_is_reported_and_another_tokenizer_refused(
    tiny_config, tmp_path, write_tiny, stop_at, events
):
    data = write_tiny(tmp_path / "data")
    config = tiny_config(data__path=str(data))
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(3)])
    shutil.rmtree(data)
    write_tiny(data, num_documents=48)
    run_training(config, tmp_path / "run")
    assert any("data" in event["text"] for event in events(tmp_path / "run", "difference"))
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="another tokenizer"):
        run_training(config, tmp_path / "run")


def test_more_shards_than_processes_are_refused_with_the_command(tiny_config, tmp_path):
    message = r"parallel\.shard=2 does not fit 1 process.*train\.devices=2, .*--nproc-per-node 2"
    with pytest.raises(ConfigError, match=message):
        run_training(tiny_config(parallel__shard=2), tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_config_without_data_is_refused_with_the_command(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path is not set.*flatout prepare"):
        run_training(tiny_config(data__path=None), tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()
