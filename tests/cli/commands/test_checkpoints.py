import json
import shutil
import time

import pytest

from flatout.cli.commands.checkpoints import checkpoints
from flatout.errors import CheckpointError, ConfigError
from flatout.training.checkpoint import catalog
from flatout.training.run_dir.lock import hold_lock


@pytest.fixture
def fox(fox_run, tmp_path):
    """A copy of a run with a checkpoint at each of its three steps."""
    return shutil.copytree(fox_run[0] / "runs" / "fox", tmp_path / "fox")


def spoil(run, step):
    path = catalog.checkpoint_path(run, step) / "model-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_every_checkpoint_is_listed_with_its_losses(fox):
    found = checkpoints(fox)
    records = [json.loads(line) for line in (fox / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["val/loss"] for record in records if "val/loss" in record}
    assert [item.step for item in found.items] == [1, 2, 3]
    assert {item.step: item.val_loss for item in found.items} == losses
    assert all(item.valid and item.problems == [] for item in found.items)
    assert [item.step for item in found.items if item.best] == [min(losses, key=losses.get)]
    assert all(
        0 <= item.age_s == pytest.approx(time.time() - item.info.saved_at, abs=60)
        for item in found.items
    )
    assert (found.aside, found.removed) == ([], [])
    head, columns, *rows = found.summary().splitlines()
    assert head.startswith(f"{fox}: 3 checkpoints, ")
    assert columns.split() == ["step", "loss", "val", "loss", "size", "age", "state"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]


def test_a_damaged_one_is_not_valid_and_shows_why(fox):
    spoil(fox, 2)
    (catalog.checkpoint_path(fox, 1) / "state.json").unlink()
    first, second, third = checkpoints(fox).items
    assert (first.valid, second.valid, third.valid) == (False, False, True)
    assert first.problems[0].endswith("state.json is missing.")
    assert "SHA-256" in second.problems[0]
    assert second.train_loss == second.info.train_loss
    assert "SHA-256" in checkpoints(fox).summary()


def test_quick_claims_only_what_it_checks(fox):
    """A bit that flipped in the newest checkpoint would otherwise move the mark of the best."""
    best = [item.step for item in checkpoints(fox).items if item.best]
    spoil(fox, 3)
    state = catalog.checkpoint_path(fox, 3) / "state.json"
    state.write_text(state.read_text().replace(f'"step": {best[0]}', '"step": 1'))
    (catalog.checkpoint_path(fox, 1) / "state.json").unlink()
    found = checkpoints(fox, quick=True)
    assert [item.state for item in found.items] == ["not valid", "sizes match", "sizes match"]
    assert [item.valid for item in found.items] == [False, None, None]
    assert [item.best for item in found.items] == [None] * 3
    assert [row.split("  ")[-1] for row in found.summary().splitlines()[2:5]] == [
        "not valid",
        "sizes match",
        "sizes match",
    ]
    assert [item.state for item in checkpoints(fox).items] == ["not valid", "valid", "not valid"]
    with pytest.raises(ConfigError, match="--quick does not find out which ones are valid"):
        checkpoints(fox, quick=True, keep=1)
    assert catalog.steps(fox) == [1, 2, 3]


def test_checkpoints_of_earlier_versions_take_their_losses_from_the_metrics(fox):
    last = checkpoints(fox).items[2].val_loss
    for step in (1, 2, 3):
        path = catalog.checkpoint_path(fox, step)
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["files"]["info.json"]
        (path / "manifest.json").write_text(json.dumps(manifest))
        (path / "info.json").unlink()
    with (fox / "metrics.jsonl").open("a") as file:
        file.write('{"step": [1]}\n{"step": 3, "train/loss": 2.5, "val/loss": "low"}\n')
    items = checkpoints(fox).items
    assert [item.info for item in items] == [None] * 3
    assert (items[2].train_loss, items[2].val_loss) == (2.5, last)
    assert all(item.valid and item.val_loss for item in items[:2])


def test_a_newer_format_is_not_valid_and_names_it(fox):
    path = catalog.checkpoint_path(fox, 3) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 9}))
    assert "format_version 9" in checkpoints(fox).items[2].problems[0]


def test_keep_deletes_all_but_the_newest_valid_and_the_best(fox):
    spoil(fox, 3)
    state = catalog.checkpoint_path(fox, 2) / "state.json"
    best = catalog.best_step_of(state.parent)
    found = checkpoints(fox, keep=1)
    left = sorted({2, 3, best})
    assert catalog.steps(fox) == left == [item.step for item in found.items]
    assert len(found.removed) == 3 - len(left)
    assert checkpoints(fox, keep=1).removed == []


def test_those_set_aside_are_listed_and_deleted_on_request(fox):
    (moved,) = catalog.set_aside(fox, after=2)
    found = checkpoints(fox)
    assert [item.path for item in found.aside] == [str(moved)]
    assert "--remove-aside` deletes them" in found.summary()
    assert moved.exists()
    found = checkpoints(fox, remove_aside=True)
    assert (found.removed, found.aside, moved.exists()) == ([str(moved)], [], False)
    assert f"Deleted {moved}" in found.summary()
    assert catalog.steps(fox) == [1, 2]


def test_nothing_is_deleted_while_the_run_trains(fox):
    with hold_lock(fox):
        assert len(checkpoints(fox).items) == 3
        for words in ({"keep": 1}, {"remove_aside": True}):
            with pytest.raises(CheckpointError, match="is in use"):
                checkpoints(fox, **words)
    with pytest.raises(ConfigError, match="keep=0 must be a whole number from 1 or None"):
        checkpoints(fox, keep=0)
    assert catalog.steps(fox) == [1, 2, 3]


def test_nothing_is_deleted_through_a_link(fox, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (fox / "checkpoints").rename(elsewhere)
    (fox / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="symbolic link"):
        checkpoints(fox, keep=1)
    assert len(list(elsewhere.iterdir())) == 3


def test_a_run_without_checkpoints_says_when_it_saves(fox):
    shutil.rmtree(fox / "checkpoints")
    found = checkpoints(fox)
    assert found.items == []
    assert "has no checkpoint yet" in found.summary()
