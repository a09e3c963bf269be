"""When a run saves, and what each checkpoint states about itself."""

import json
import socket

import pytest

from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import INFO, read_info
from flatout.training.run import run_training
from flatout.training.run_dir import layout

pytestmark = pytest.mark.slow


def test_multiples_of_keep_every_are_saved_and_stay(tiny_config, tmp_path):
    """Every ten minutes is the interval, so no other save happens before the end."""
    config = tiny_config(
        train__steps=7, train__eval_every=3, checkpoint__keep=1, checkpoint__keep_every=2
    )
    config = config.with_values({"checkpoint.best": False})
    run_training(config, tmp_path / "run")
    assert catalog.steps(tmp_path / "run") == [2, 4, 6, 7]


def test_a_checkpoint_states_what_it_is(tiny_config, tmp_path):
    config = tiny_config(train__steps=4, train__eval_every=2, checkpoint__keep=9)
    folder = tmp_path / "run"
    summary = run_training(config, folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
    evaluated = {record["step"]: record["val/loss"] for record in records if "val/loss" in record}
    stored = layout.read_config(folder)
    for step in catalog.steps(folder):
        path = catalog.checkpoint_path(folder, step)
        info = read_info(path)
        assert info is not None
        assert (info.step, info.tokens) == (step, step * config.batch.tokens_per_step)
        assert info.train_loss == pytest.approx(losses[step])
        assert info.val_loss in (evaluated.get(step), None)
        assert info.config_digest == stored.digest()
        assert info.host == socket.gethostname()
        assert INFO in {file.name for file in catalog.read_manifest(path).files}
    assert read_info(catalog.checkpoint_path(folder, 2)).val_loss == evaluated[2]
    assert info.elapsed_s <= summary["elapsed_s"]
    assert info.tokens_per_s > 0


def test_all_checkpoints_stay_with_keep_all(tiny_config, tmp_path):
    config = tiny_config(train__steps=4, checkpoint__keep="all", checkpoint__every_steps=1)
    run_training(config, tmp_path / "run")
    assert catalog.steps(tmp_path / "run") == [1, 2, 3, 4]


def test_one_process_saves_by_the_clock_at_any_step(tiny_config, tmp_path):
    config = tiny_config(
        train__steps=3, log__every=100, checkpoint__every_minutes=1e-9, checkpoint__keep="all"
    )
    run_training(config, tmp_path / "run")
    assert catalog.steps(tmp_path / "run") == [1, 2, 3]
