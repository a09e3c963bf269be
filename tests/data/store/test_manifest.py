import json

import numpy as np
import pytest

from flatout.data.store.manifest import read_manifest, token_dtype
from flatout.data.store.shards import Dataset
from flatout.errors import DataError


def test_a_manifest_reads_back_as_written(write_set):
    folder = write_set(np.arange(10), np.arange(5), mask=np.ones(10))
    manifest = read_manifest(folder)
    assert manifest.model_dump(mode="json") == json.loads((folder / "manifest.json").read_text())
    assert [path.name for path in folder.glob("manifest*")] == ["manifest.json"]
    assert (manifest.format_version, manifest.tokens, manifest.documents, manifest.text_bytes) == (
        3,
        15,
        2,
        60,
    )


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_the_stored_type_holds_every_id(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m | {"format_version": 99}, "a newer version of flatout.*Install a newer"),
        (lambda m: m | {"format_version": 2}, "an earlier version of flatout.*Prepare the dataset"),
        (lambda m: m | {"dtype": "float8"}, "dtype"),
        (lambda m: {k: v for k, v in m.items() if k != "vocab_size"}, "vocab_size"),
        (lambda m: m | {"unheard_of": 1}, "unheard_of"),
        (lambda m: [m], "not a manifest"),
        (lambda m: json.loads(json.dumps(m).replace('"00000', '"../00000')), "not a manifest"),
    ],
)
def test_an_unusable_manifest_is_rejected(write_set, edit, message):
    path = write_set(np.arange(10)) / "manifest.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=message):
        Dataset.open(path.parent)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"vocab_size": 300', '"vocab_size": 301'),
        ('"text_bytes": 40', '"text_bytes": 41'),
        ('"split_rule": "', '"split_rule": "n'),
    ],
)
def test_a_changed_value_is_noticed_by_every_reader(write_set, old, new):
    path = write_set(np.arange(10), np.arange(5)) / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(
        DataError, match=r"manifest\.json is damaged: its content does not match its digest"
    ):
        Dataset.open(path.parent)


def test_every_character_of_the_digest_counts_and_it_is_required(write_set):
    path = write_set(np.arange(10)) / "manifest.json"
    document = json.loads(path.read_text())
    for changed in (
        document | {"sha256": "0" * 64},
        {k: v for k, v in document.items() if k != "sha256"},
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(DataError, match="is damaged"):
            Dataset.open(path.parent)
