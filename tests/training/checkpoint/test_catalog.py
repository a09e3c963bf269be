import json

import pytest
from fakes import fake_checkpoint

from flatout.errors import CheckpointError
from flatout.storage import whole
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import INFO, CheckpointInfo, prune, read_info
from flatout.training.run_dir.lookup import find_checkpoint


def make(run, step, *, best=None):
    """Create a checkpoint that names the best step."""
    state = json.dumps({"values": {"best": {"val_loss": 1.0, "step": best}}}).encode()
    return fake_checkpoint(run, step, state, **{"model-00000": b"weights"})


@pytest.mark.parametrize(
    "name", ["step-", "step-01", "step-5.part-a", "step-5.aside-a", "checkpoint-5", "step--1"]
)
def test_only_step_n_is_a_checkpoint(tmp_path, name):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    make(tmp_path, 0)
    (tmp_path / "checkpoints" / "step-7").write_text("a file")
    assert catalog.steps(tmp_path) == [0]
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        catalog.step_of(tmp_path / name)


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 100, 20):
        make(tmp_path, step)
    assert catalog.steps(tmp_path) == [9, 20, 100]
    assert catalog.latest(tmp_path).name == "step-100"
    assert catalog.steps(tmp_path / "none") == []


def test_verify_names_every_damaged_file(tmp_path):
    path = make(tmp_path, 3)
    assert catalog.verify(path) == []
    (path / "model-00000.safetensors").write_bytes(b"weighty")
    (path / "state.json").unlink()
    problems = catalog.verify(path)
    assert len(problems) == 2
    assert "does not match its checksum" in problems[0]
    assert "missing" in problems[1]


def test_verify_says_what_is_wrong_with_an_index(tmp_path):
    """Sizes alone do not show it."""
    path = make(tmp_path, 3)
    (path / "index.json").write_bytes(b"?" * (path / "index.json").stat().st_size)
    (problem,) = catalog.verify(path, deep=False)
    assert "index.json is damaged" in problem


def test_best_is_read_from_the_newest_checkpoint(tmp_path):
    assert catalog.best(make(tmp_path, 5)) is None
    make(tmp_path, 10, best=5)
    assert catalog.best(make(tmp_path, 15, best=10)).name == "step-10"
    assert catalog.best(make(tmp_path, 20, best=20)).name == "step-20"


def test_only_the_weights_of_the_checkpoint_to_read_are_hashed(tmp_path, monkeypatch):
    hashed, sha256 = [], whole.sha256
    monkeypatch.setattr(whole, "sha256", lambda path: hashed.append(path) or sha256(path))
    for step, best in ((5, 5), (10, 5), (15, 15)):
        make(tmp_path, step, best=best)
        hashed.clear()
        found = find_checkpoint(tmp_path)
        assert found.name == f"step-{best}"
        weights = [path for path in hashed if path.suffix == ".safetensors"]
        assert weights == [found / "model-00000.safetensors"]


def test_best_is_none_when_it_is_deleted_or_damaged(tmp_path):
    first = make(tmp_path, 5)
    newest = make(tmp_path, 10, best=5)
    (first / "model-00000.safetensors").write_bytes(b"")
    assert catalog.best(newest) is None
    prune(tmp_path, keep=1)
    assert catalog.best(newest) is None


def test_what_was_replaced_and_what_a_killed_upload_left_are_deleted(tmp_path):
    left = {f"step-5.old-{'a' * 16}", f"step-7.part-upload-{'b' * 16}"}
    for name in (*left, "step-5.old-mine"):
        make(tmp_path, int(name[5])).rename(tmp_path / "checkpoints" / name)
    make(tmp_path, 5)
    assert {*catalog.remove_leftovers(tmp_path)} == left
    assert catalog.steps(tmp_path) == [5]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-5", "step-5.old-mine"]


def test_weights_that_changed_are_no_best_or_last_checkpoint(tmp_path):
    for step, best in ((5, 5), (10, 5), (15, 15)):
        path = make(tmp_path, step, best=best)
    (path / "model-00000.safetensors").write_bytes(b"WEIGHTS")
    assert find_checkpoint(tmp_path, "best").name == "step-5"
    assert find_checkpoint(tmp_path, "last").name == "step-10"


CONTENT = {
    "step": 3,
    "tokens": 300,
    "train_loss": 2.5,
    "val_loss": None,
    "tokens_per_s": 1000.0,
    "elapsed_s": 0.3,
    "saved_at": 1.7e9,
    "config_digest": "ab" * 32,
    "host": "node-1",
    "world_size": 2,
    "flatout": "0.2.0",
    "torch": "2.13.0",
    "python": "3.12.1",
}


def test_what_is_written_reads_back_and_keys_of_later_versions_are_ignored(tmp_path):
    (tmp_path / INFO).write_text(json.dumps(CONTENT | {"colour": "blue"}))
    assert read_info(tmp_path) == CheckpointInfo(**CONTENT)


@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"step": 3}', json.dumps({**CONTENT, "step": "3"})]
)
def test_without_a_readable_file_nothing_is_known(tmp_path, text):
    if text is not None:
        (tmp_path / INFO).write_text(text)
    assert read_info(tmp_path) is None
