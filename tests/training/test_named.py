"""Runs and checkpoints by name, and what is said of names that are none."""

import pytest

from flatout.errors import CheckpointError, ConfigError
from flatout.training.named import find_checkpoint, find_run, resume_place


def test_checkpoints_by_name(fox_run):
    folder = fox_run[0] / "runs" / "fox"
    assert find_checkpoint(folder, "last").name == "step-3"
    assert find_checkpoint(folder, "1").name == "step-1"
    assert find_checkpoint(folder, "best").parent == folder / "checkpoints"
    with pytest.raises(CheckpointError, match="no checkpoint of step 7") as error:
        find_checkpoint(folder, "7")
    assert "1, 2, 3" in error.value.fix
    with pytest.raises(ConfigError, match="best, last, or the number"):
        find_checkpoint(folder, "newest")


def test_runs_are_found_by_name_and_mistyped_names_answered(fox_run, monkeypatch):
    monkeypatch.chdir(fox_run[0])
    assert find_run("fox").resolve() == fox_run[0] / "runs" / "fox"
    with pytest.raises(CheckpointError, match="Did you mean runs/fox"):
        find_run("foxx")


def test_no_name_is_no_run_even_inside_one(fox_run, monkeypatch):
    monkeypatch.chdir(fox_run[0] / "runs" / "fox")
    assert find_run(".").resolve() == fox_run[0] / "runs" / "fox"
    with pytest.raises(CheckpointError, match="is not a run folder"):
        find_run("")


def test_a_checkpoint_is_not_taken_for_a_run(fox_run):
    run = fox_run[0] / "runs" / "fox"
    with pytest.raises(CheckpointError, match="is a checkpoint of the run") as error:
        find_run(run / "checkpoints" / "step-2")
    assert "--checkpoint 2" in error.value.fix


def test_resuming_takes_a_run_by_its_name(fox_run, monkeypatch):
    monkeypatch.chdir(fox_run[0])
    assert resume_place("fox") == "runs/fox"
    assert [resume_place(given) for given in ("auto", "never", "gone/run", "runs")] == ["auto", "never", "gone/run", "runs"]
    with pytest.raises(CheckpointError, match=r"There is no checkpoint foxx.*runs/fox"):
        resume_place("foxx")
