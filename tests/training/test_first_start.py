"""The same command completes a first start that was killed or failed to write."""

import errno
import os
from pathlib import Path

import pytest

from flatout.errors import CheckpointError, FlatoutError
from flatout.training.run import run_training
from flatout.training.run_dir import layout, lock

pytestmark = pytest.mark.slow

NUM_RENAMES = 2
"""config.yaml, tokenizer.json."""


class Killed(BaseException):
    """Simulates SIGKILL: no code handles it."""


@pytest.fixture
def start(tiny_config, tmp_path):
    """Return a function that starts a run from another's checkpoint."""
    first = tiny_config(train__steps=2, checkpoint__every_steps=1, checkpoint__keep=9)
    run_training(first, tmp_path / "first")
    config = first.with_values({"train.steps": 3})

    def call(name="run"):
        return run_training(
            config, tmp_path / name, resume=str(tmp_path / "first" / "checkpoints" / "step-1")
        )

    return call


def end_at(monkeypatch, number, error):
    """Fail a rename, counted from 0, with an error; return the list of renames."""
    replace, seen = Path.replace, []

    def replace_or_end(self, target):
        seen.append(Path(target).name)
        if len(seen) == number + 1:
            raise error
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_or_end)
    return seen


@pytest.mark.parametrize("number", range(NUM_RENAMES))
def test_the_same_command_completes_a_killed_start(number, start, tmp_path, monkeypatch):
    whole = start("whole")
    with monkeypatch.context() as patch:
        patch.setattr(lock, "_remove_failed_start", lambda *_: None)  # a kill skips all cleanup
        seen = end_at(patch, number, Killed())
        with pytest.raises(Killed):
            start()
    assert seen[number] in {layout.CONFIG, "tokenizer.json"}
    resumed = start()
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert not list((tmp_path / "run").glob("*.part"))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("number", range(NUM_RENAMES))
def test_a_start_that_fails_to_write_leaves_nothing_behind(
    number, error, start, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        end_at(patch, number, OSError(error, os.strerror(error)))
        with pytest.raises(FlatoutError) as failed:
            start()
    if number < NUM_RENAMES - 1:
        assert not (tmp_path / "run").exists()
    if not isinstance(failed.value, CheckpointError):
        assert ("Free space" in failed.value.fix) == (error == errno.ENOSPC)
    assert start()["steps"] == 3


def test_a_directory_with_other_files_is_not_a_killed_start(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("{}")
    (tmp_path / "run" / "mine.part").write_text("mine")
    with pytest.raises(CheckpointError, match="not a run directory"):
        start()
    assert (tmp_path / "run" / "mine.part").exists()
