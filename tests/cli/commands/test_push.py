"""`push` and `pull` move a dataset and back, checked, and replace nothing."""

import pytest

import flatout
from flatout.errors import DataError, OutputInUse, UsageError


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_dataset_comes_back_equal_and_the_same_call_again_changes_nothing(tiny_set, tmp_path):
    there = (tmp_path / "store").as_uri()
    sent = flatout.push(tiny_set, there)
    assert sent.path.startswith(f"{there}/{tiny_set.name}-")
    for _ in range(2):
        assert flatout.pull(sent.path, tmp_path / "copy").path == str(tmp_path / "copy")
        assert contents(tmp_path / "copy") == contents(tiny_set)
    assert flatout.push(tiny_set, there).path == sent.path


def test_what_is_not_whole_or_in_use_is_rejected(tiny_set, tmp_path):
    there = (tmp_path / "store").as_uri()
    with pytest.raises(UsageError, match="is not a URL"):
        flatout.push(tiny_set, "store")
    with pytest.raises(DataError, match="no whole directory"):
        flatout.pull(there, tmp_path / "copy")
    sent = flatout.push(tiny_set, there)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(OutputInUse, match="other files"):
        flatout.pull(sent.path, tmp_path / "mine")
