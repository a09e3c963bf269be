import json

import numpy as np
import pytest

from flatout.data.manifest import read_manifest, token_dtype
from flatout.data.shards import Dataset
from flatout.errors import DataError


def test_it_reads_back_as_written(write_set):
    folder = write_set(np.arange(10), np.arange(5), mask=np.ones(10))
    manifest = read_manifest(folder)
    assert manifest.model_dump(mode="json") == json.loads((folder / "manifest.json").read_text())
    assert [path.name for path in folder.glob("manifest*")] == ["manifest.json"]
    assert (manifest.format_version, manifest.tokens, manifest.documents, manifest.text_bytes) == (1, 15, 2, 60)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_the_stored_type_holds_every_id(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype


def test_no_manifest_says_how_to_prepare(tmp_path):
    with pytest.raises(DataError, match=r"no data set folder .*Fix: Prepare it with `flatout prepare"):
        Dataset.open(tmp_path / "absent")
    with pytest.raises(DataError, match=r"no manifest\.json.*flatout prepare"):
        Dataset.open(tmp_path)
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(DataError, match="flatout prepare"):
        Dataset.open(tmp_path / "file.txt")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m | {"format_version": 99}, "Install a newer flatout"),
        (lambda m: m | {"dtype": "float8"}, "dtype"),
        (lambda m: {k: v for k, v in m.items() if k != "vocab_size"}, "vocab_size"),
        (lambda m: m | {"unheard_of": 1}, "unheard_of"),
        (lambda m: [m], "not a manifest"),
    ],
)
def test_a_manifest_that_cannot_be_used(write_set, edit, message):
    path = write_set(np.arange(10)) / "manifest.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=message):
        Dataset.open(path.parent)


def test_a_torn_manifest(write_set):
    path = write_set(np.arange(10)) / "manifest.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(DataError, match="not a manifest"):
        Dataset.open(path.parent)


def test_a_manifest_that_is_not_text(write_set):
    path = write_set(np.arange(10)) / "manifest.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"Cannot read .*manifest\.json: .*prepare the data set again"):
        Dataset.open(path.parent)


def test_a_manifest_cannot_name_a_file_elsewhere(write_set):
    path = write_set(np.arange(10)) / "manifest.json"
    path.write_text(path.read_text().replace("train-00000.bin", "../train-00000.bin"))
    with pytest.raises(DataError, match="not a manifest"):
        Dataset.open(path.parent)
