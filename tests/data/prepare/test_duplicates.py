import random

import numpy as np
import pytest
from prepared import documents, prepared, write_rows

from flatout.data.prepare import join as dedup
from flatout.data.prepare.join import runs
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.prepare.plan import make
from flatout.data.sources import files
from flatout.data.store.shards import Dataset
from flatout.errors import DataError

pytestmark = pytest.mark.slow


def write(path, texts, prompts=None):
    rows = [
        {"text": text} | ({"ask": prompts[number]} if prompts else {})
        for number, text in enumerate(texts)
    ]
    return str(write_rows(path, rows))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 700)
    monkeypatch.setattr(make, "RANGE_BYTES", 1_400)


@pytest.mark.parametrize("at_once", [7, 1 << 20], ids=["many passes", "one pass"])
@pytest.mark.parametrize("split", ["hash 0.3", "tail 0.4"])
def test_the_first_of_equal_documents_stays(tmp_path, small, monkeypatch, at_once, split):
    monkeypatch.setattr(dedup, "SORTED_AT_ONCE", at_once)
    draw = random.Random(0)
    texts = [f"text {draw.randint(0, 150)} " * draw.randint(1, 2) for _ in range(400)]
    options = Options(tokenizer="byte", split=split, duplicates="drop")
    made = prepare_dataset(
        [write(tmp_path / "rows.jsonl", texts)], tmp_path / "out", options, workers=1
    )
    unique = list(dict.fromkeys(texts))
    train, val = documents(made.path, "train"), documents(made.path, "val")
    assert sorted(train + val) == sorted(unique)
    assert [text for text in unique if text in set(train)] == train
    assert [text for text in unique if text in set(val)] == val
    assert made.manifest.documents == len(unique)
    assert made.manifest.text_bytes == sum(map(len, unique))
    assert [(entry.reason, entry.count) for entry in made.manifest.skipped] == [
        ("duplicate document", len(texts) - len(unique))
    ]
    again = prepare_dataset([str(tmp_path / "rows.jsonl")], tmp_path / "two", options, workers=2)
    assert {path.name: path.read_bytes() for path in made.path.iterdir()} == {
        path.name: path.read_bytes() for path in again.path.iterdir()
    }


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("split", ["hash 0.3", "tail 0.4"])
def test_the_first_dropped_documents_are_named_by_file_and_line(tmp_path, small, split, workers):
    texts = [f"text {number}" for number in range(300)]
    for number in (13, *range(200, 214)):
        texts[number] = "text 3"
    path = write(tmp_path / "rows.jsonl", texts)
    made = prepared(path, out=tmp_path / "out", split=split, duplicates="drop", workers=workers)
    (entry,) = made.manifest.skipped
    assert (entry.reason, entry.count) == ("duplicate document", 15)
    assert entry.first == tuple(f"{path}, line {number + 1}" for number in (13, *range(200, 209)))


def test_a_range_with_untokenisable_documents_names_none(tmp_path, small):
    texts = ["\ud800", "a", "b", "a", *(f"text {number}" for number in range(200)), "text 199"]
    path = write(tmp_path / "rows.jsonl", texts)
    options = Options(tokenizer="byte", split="hash 0.3", duplicates="drop", on_bad_row="skip")
    made = prepare_dataset([path], tmp_path / "out", options, workers=1)
    first = {entry.reason: (entry.count, entry.first) for entry in made.manifest.skipped}
    assert first["duplicate document"] == (2, (f"{path}, line {len(texts)}",))
    assert made.manifest.documents == len(texts) - 3


def test_prompts_and_their_ends_distinguish_documents(tmp_path):
    path = write(tmp_path / "ends.jsonl", ["b", "\0b", "c" * 40], ["a\0", "a", ""])
    made = prepared(
        path, out=tmp_path / "ends", split="tail 0.9", duplicates="drop", mask_field="ask"
    )
    assert sum(entry.count for entry in made.manifest.skipped) == 0
    texts = ["yes"] * 4 + ["not"] * 4
    path = write(tmp_path / "rows.jsonl", texts, ["a", "b", "a", "c", "a", "b", "b", "d"])
    made = prepared(
        path, out=tmp_path / "out", split="tail 0.5", duplicates="drop", mask_field="ask"
    )
    found = documents(made.path, "train") + documents(made.path, "val")
    assert found == ["ayes", "byes", "cyes", "anot", "bnot", "dnot"]
    mask = (
        Dataset.open(made.path)
        .split("train")
        .read_mask_range(0, made.manifest.splits["train"].tokens)
    )
    assert mask.tolist() == [False, True, True, True, True] * 3


def test_validation_text_of_duplicates_alone_is_rejected(tmp_path):
    path = write(tmp_path / "rows.jsonl", ["same text"] * 20)
    with pytest.raises(DataError, match="for validation"):
        prepared(path, out=tmp_path / "out", split="tail 0.5", duplicates="drop")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("workers", [1, 2])
def test_separate_validation_text_stays_and_training_drops_shared_documents(
    tmp_path, small, workers
):
    train = [f"text {number % 200}" for number in range(300)]
    val = ["text 3", "only here", "text 7", "only here", "text 3"]
    options = Options(
        tokenizer="byte", duplicates="drop", val=(write(tmp_path / "valid.jsonl", val),)
    )
    path = write(tmp_path / "rows.jsonl", train)
    made = prepare_dataset([path], tmp_path / "out", options, workers=workers)
    assert documents(made.path, "val") == val
    assert documents(made.path, "train") == [
        text for text in dict.fromkeys(train) if text not in val
    ]
    (entry,) = made.manifest.skipped
    assert (entry.reason, entry.count) == ("duplicate document", 102)
    assert entry.first[:3] == tuple(f"{path}, line {number + 1}" for number in (3, 7, 200))


def test_the_same_text_in_both_splits_leaves_nothing_to_train_on(tmp_path):
    path = write(tmp_path / "rows.jsonl", ["same", "text"])
    with pytest.raises(DataError, match=r"rows.jsonl is both training and validation text"):
        prepared(path, out=tmp_path / "out", val=(path,))
    with pytest.raises(
        DataError, match=r"rows.jsonl contains no documents \(2 duplicate document\)"
    ):
        prepared(path, out=tmp_path / "out", val=(path,), duplicates="drop")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("drops", "wanted"),
    [
        ([0, 0, 0], [(0, 9)]),
        ([0, 1, 0], [(0, 2), (5, 9)]),
        ([1, 0, 0], [(2, 9)]),
        ([0, 0, 1], [(0, 5)]),
        ([1, 1, 1], []),
        ([1, 0, 1], [(2, 5)]),
    ],
)
def test_kept_documents_are_copied_in_runs(drops, wanted):
    assert runs(np.array([2, 5, 9]), np.array(drops, bool)) == wanted
    assert runs(np.empty(0, int), np.empty(0, bool)) == []
