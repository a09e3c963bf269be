"""Runs, their metrics and checkpoints by name, and the errors for unknown names."""

import json
import os
import shutil
from pathlib import Path

import pytest
from fakes import Recorder, restate

import flatout
from flatout.config.schema import RunConfig
from flatout.errors import CheckpointError, ConfigError
from flatout.training.run_dir import layout
from flatout.training.run_dir.lookup import (
    columns,
    find_checkpoint,
    find_run,
    resume_path,
    run_or_newest,
)


def test_checkpoints_by_name(fox_run):
    run = fox_run[0] / "runs" / "fox"
    assert find_checkpoint(run, "last").name == "step-3"
    assert find_checkpoint(run, "1").name == "step-1"
    assert find_checkpoint(run, "best").parent == run / "checkpoints"
    with pytest.raises(CheckpointError, match="no checkpoint of step 7") as error:
        find_checkpoint(run, "7")
    assert "1, 2, 3" in error.value.fix
    with pytest.raises(ConfigError, match="best, last, or the number"):
        find_checkpoint(run, "newest")


def with_best_step(checkpoint, step):
    """Rewrite a checkpoint so that `step` had the lowest validation loss."""
    state = checkpoint / "state.json"
    document = json.loads(state.read_text())
    document["values"]["best"]["step"] = step
    state.write_text(json.dumps(document))
    restate(checkpoint)


def test_a_best_step_without_a_checkpoint_is_an_error_only_if_it_was_asked_for(fox_run, tmp_path):
    run, progress = tmp_path / "fox", Recorder()
    shutil.copytree(fox_run[0] / "runs" / "fox", run)
    with_best_step(run / "checkpoints" / "step-3", 2)
    assert flatout.evaluate(run, checkpoint="best").checkpoint.endswith("step-2")
    shutil.rmtree(run / "checkpoints" / "step-2")
    assert flatout.evaluate(run, progress=progress).checkpoint.endswith("step-3")
    assert "Step 2 had the lowest validation loss" in progress.lines[-1]
    assert progress.lines[-1].endswith("Using the last one, of step 3.")
    for command in (flatout.sample, flatout.evaluate, flatout.export):
        with pytest.raises(CheckpointError, match=r"Step 2 .* no complete checkpoint\.") as refused:
            command(run, checkpoint="best")
        assert refused.value.fix == "Use --checkpoint last, which is step 3."
    with_best_step(run / "checkpoints" / "step-3", None)
    with pytest.raises(CheckpointError, match="No validation loss of this run is known"):
        flatout.sample(run, checkpoint="best")
    said = Recorder()
    assert flatout.evaluate(run, progress=said).checkpoint.endswith("step-3")
    assert not any("validation loss" in line for line in said.lines)


def test_runs_are_found_by_name_and_typos_get_a_suggestion(fox_run, monkeypatch):
    monkeypatch.chdir(fox_run[0])
    assert find_run("fox").resolve() == fox_run[0] / "runs" / "fox"
    with pytest.raises(CheckpointError, match="Did you mean runs/fox"):
        find_run("foxx")


def test_resume_accepts_the_name_of_a_run(fox_run, monkeypatch):
    monkeypatch.chdir(fox_run[0])
    assert resume_path("fox") == "runs/fox"
    assert [resume_path(given) for given in ("auto", "never", "gone/run", "runs")] == [
        "auto",
        "never",
        "gone/run",
        "runs",
    ]
    with pytest.raises(CheckpointError, match=r"--resume foxx names no run.*mean 'fox'"):
        resume_path("foxx")


def test_without_a_name_the_newest_run_with_a_checkpoint_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("new", "damaged", "newest", "older", "oldest")):
        layout.write_config(Path("runs", name), RunConfig())
        os.utime(Path("runs", name, "config.yaml"), (1e9 - age, 1e9 - age))
        if name != "new":
            Path("runs", name, "checkpoints", "step-3").mkdir(parents=True)
    Path("runs/damaged/config.yaml").write_text("checkpoint: [")
    recorder = Recorder()
    assert run_or_newest(None, progress=recorder) == Path("runs/newest")
    assert recorder.lines == ["The newest run: runs/newest"]
    assert run_or_newest("older") == Path("runs/older")


def test_rows_keep_their_order_and_gaps_are_none():
    rows = [{"step": 1, "train/loss": 3.0}, {"step": 1, "val/loss": 2.5}]
    assert columns(rows) == {"step": [1, 1], "train/loss": [3.0, None], "val/loss": [None, 2.5]}
    assert columns([]) == {}


def test_metrics_of_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: tiny\n")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 2, "train/loss": 4.5}\n{"step": 3, ')
    table = flatout.metrics(tmp_path / "run")
    assert table == {"step": [2], "train/loss": [4.5]}
    with pytest.raises(CheckpointError, match="There is no run directory"):
        flatout.metrics(tmp_path / "rum")
