from pathlib import Path

import pytest
from prepared import prepared

from flatout.cli.commands.verify import verify
from flatout.data.store.shards import Dataset
from flatout.errors import DataError


def test_equivalent_options_mean_the_same_dataset(rows, tmp_path):
    made = prepared(rows, out=tmp_path / "out", split="tail 0.20")
    for text_field in (None, "text"):
        for split in ("tail 0.2", "tail:2e-1", "tail 0.20"):
            assert prepared(rows, out=made.path, split=split, text_field=text_field).existed
    with pytest.raises(
        DataError, match=r"split is 'tail 0\.2', and 'tail 0\.2000001' is requested"
    ):
        prepared(rows, out=made.path, split="tail 0.2000001")


def test_a_home_directory_is_expanded(book, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    made = prepared(book, out="~/sets/one")
    assert made.path == tmp_path / "home" / "sets" / "one"
    assert made.manifest == Dataset.open("~/sets/one").manifest
    assert prepared(book, out="~/sets/one").existed
    assert verify(Path("~/sets/one")).ok
    assert not (tmp_path / "~").exists()
    for call in (
        lambda: prepared(book, out="~nosuch/x"),
        lambda: prepared(book, out=tmp_path / "out", tokenizer="~nosuch/tok.json"),
        lambda: Dataset.open("~nosuch/x"),
    ):
        with pytest.raises(DataError, match="no home directory is known for '~nosuch'"):
            call()
