"""A run whose directory is moved, deleted or taken ends with a sentence and writes nothing more."""

import json
import shutil

import pytest

from flatout.errors import RunFailed
from flatout.training.checkpoint import catalog
from flatout.training.metrics.observers import Quiet
from flatout.training.run import run_training
from flatout.training.run_dir.layout import LOCK

pytestmark = pytest.mark.slow


class At(Quiet):
    """Calls a function after a step."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_tick(self, step, last_step):
        if step == self.step:
            self.call()


@pytest.mark.parametrize("steps", [4, 3], ids=["at the next save", "at the end"])
def test_a_deleted_directory_is_not_made_again(tiny_config, tmp_path, steps):
    run = tmp_path / "run"
    config = tiny_config(checkpoint__every_steps=2, train__steps=steps, train__eval_every=0)
    with pytest.raises(RunFailed, match="run was moved or deleted while the run trained"):
        run_training(config, run, observers=[At(3, lambda: shutil.rmtree(run))])
    assert not run.exists()


def test_a_deleted_lock_is_named(tiny_config, tmp_path):
    run = tmp_path / "run"
    config = tiny_config(checkpoint__every_steps=2, train__eval_every=0)
    with pytest.raises(RunFailed, match="lock was deleted while the run trained") as ended:
        run_training(config, run, observers=[At(3, (run / LOCK).unlink)])
    assert "the same command again" in ended.value.fix
    assert run_training(config, run)["steps"] == config.train.steps


def test_a_moved_directory_continues_where_it_is(tiny_config, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    config = tiny_config(checkpoint__every_steps=2, train__eval_every=0)
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(RunFailed, match="moved or deleted"):
        run_training(config, run, observers=[At(3, lambda: run.rename(moved))])
    assert not run.exists()
    assert catalog.steps(moved) == [2]
    assert run_training(config, moved)["weights_sha256"] == whole["weights_sha256"]


def test_a_second_process_in_the_directory_is_named(tiny_config, tmp_path):
    """As where each machine has locks of its own."""
    run = tmp_path / "run"
    other = {"pid": 7, "host": "node-2", "since": 0.0, "token": "other"}
    config = tiny_config(checkpoint__every_steps=2, train__eval_every=0)
    take = At(3, lambda: (run / LOCK).write_text(json.dumps(other)))
    with pytest.raises(RunFailed, match=r"Another process trains in .* process 7 on node-2"):
        run_training(config, run, observers=[take])
    assert catalog.steps(run) == [2]
