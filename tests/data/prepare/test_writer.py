import fcntl
import os
import zlib
from itertools import pairwise

import numpy as np
import pytest

from flatout.data.prepare import join as joining
from flatout.data.prepare.writer import DatasetWriter
from flatout.data.store.manifest import BLOCK_BYTES, SkippedRows
from flatout.data.store.shards import Dataset
from flatout.errors import DataError
from flatout.storage import files

RNG = np.random.default_rng(0)


def finish(writer, tokenizer, **kwargs):
    return writer.finish(
        tokenizer=tokenizer, source={"kind": "test"}, split_rule="tail 0.1", **kwargs
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_dataset_contains_what_was_written(tmp_path, stub_tokenizer):
    skipped = [SkippedRows(reason="not UTF-8", count=2, first=("a.txt", "b.txt"))]
    with DatasetWriter(tmp_path / "a" / "b", vocab_size=300) as writer:
        writer.train.append(np.arange(5), [2, 5], text_bytes=11)
        writer.val.append(np.arange(3), [3], text_bytes=7)
        manifest = finish(writer, stub_tokenizer, skipped=skipped)
    dataset = Dataset.open(tmp_path / "a" / "b")
    assert dataset.manifest == manifest
    assert (manifest.tokens, manifest.documents, manifest.text_bytes, manifest.vocab_size) == (
        8,
        3,
        18,
        300,
    )
    assert (manifest.source, manifest.split_rule, manifest.skipped) == (
        {"kind": "test"},
        "tail 0.1",
        tuple(skipped),
    )
    assert (manifest.tokenizer.name, manifest.tokenizer.digest) == ("stub", stub_tokenizer.digest())
    assert sorted(contents(dataset.path)) == [
        "manifest.json",
        "tokenizer.json",
        "train-00000.bin",
        "train-documents.bin",
        "val-00000.bin",
        "val-documents.bin",
    ]
    assert contents(dataset.path)["train-00000.bin"] == np.arange(5, dtype="<u2").tobytes()
    assert contents(dataset.path)["train-documents.bin"] == np.array([2, 5], "<i8").tobytes()


def test_the_number_of_calls_does_not_matter(tmp_path, stub_tokenizer):
    tokens, mask = RNG.integers(0, 300, 1000), RNG.integers(0, 2, 1000)
    ends = np.array([100, 350, 351, 999])
    for name, cuts in {"whole": [0, 1000], "pieces": [0, 1, 100, 100, 350, 700, 1000]}.items():
        with DatasetWriter(tmp_path / name, vocab_size=300, shard_bytes=128) as writer:
            for first, last in pairwise(cuts):
                inside = ends[(ends > first) & (ends <= last)] - first
                writer.train.append(
                    tokens[first:last], inside, text_bytes=last - first, mask=mask[first:last]
                )
            finish(writer, stub_tokenizer)
    assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")
    split = Dataset.open(tmp_path / "pieces").split("train")
    assert split.document_ends.tolist() == [
        100,
        350,
        351,
        999,
        1000,
    ]  # what follows the last end is a document too
    assert np.array_equal(split.read_tokens(0, 1000), tokens)
    assert np.array_equal(split.read_mask_range(0, 1000), mask)


def test_each_block_has_its_own_checksum(tmp_path, stub_tokenizer):
    with DatasetWriter(tmp_path / "set", vocab_size=300) as writer:
        for _ in range(5):
            writer.train.append(RNG.integers(0, 300, BLOCK_BYTES // 4 - 3), [], text_bytes=1)
        entry = finish(writer, stub_tokenizer).splits["train"].shards[0]
    data = (tmp_path / "set" / entry.name).read_bytes()
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    assert len(blocks) == 3
    assert entry.block_crc32 == tuple(zlib.crc32(block) for block in blocks)


def test_an_error_leaves_no_files(tmp_path):
    def interrupted():
        with DatasetWriter(tmp_path / "set", vocab_size=300) as writer:
            writer.train.append(np.arange(5), [5], text_bytes=5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_the_directory_appears_only_when_complete(tmp_path, stub_tokenizer, monkeypatch):
    out = tmp_path / "set"
    seen = []
    original = joining.write_whole
    monkeypatch.setattr(
        joining, "write_whole", lambda *args: seen.append(out.exists()) or original(*args)
    )
    with DatasetWriter(out, vocab_size=300) as writer:
        writer.train.append(np.arange(5), [5], text_bytes=5)
        assert not out.exists()
        finish(writer, stub_tokenizer)
    assert seen == [False]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path, stub_tokenizer):
    killed = tmp_path / ".set.part"
    killed.mkdir()
    (killed / "train-00007.bin").write_bytes(b"old")
    with DatasetWriter(tmp_path / "set", vocab_size=300) as writer:
        finish(writer, stub_tokenizer)
    assert "train-00007.bin" not in contents(tmp_path / "set")


def test_two_writers_of_one_directory_are_rejected(tmp_path):
    (tmp_path / ".set.part").mkdir()
    other = os.open(tmp_path / ".set.part", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(DataError, match=r"Another process is writing .*set"):
            DatasetWriter(tmp_path / "set", vocab_size=300)
    finally:
        os.close(other)


def test_an_occupied_directory_is_left_alone(tmp_path, stub_tokenizer):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="not an empty directory"):
        DatasetWriter(tmp_path / "set", vocab_size=300)
    assert contents(tmp_path / "set") == {"mine.txt": b"mine"}


def test_an_empty_directory_is_filled(tmp_path, stub_tokenizer, monkeypatch):
    (tmp_path / "set").mkdir()
    monkeypatch.chdir(tmp_path / "set")
    with DatasetWriter(".", vocab_size=300) as writer:
        finish(writer, stub_tokenizer)
    assert Dataset.open(tmp_path / "set").manifest.tokens == 0


def test_an_unwritable_disk_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"Cannot write .*--out"):
        DatasetWriter(tmp_path / "file" / "set", vocab_size=300)


def test_a_full_disk_is_an_error(tmp_path, stub_tokenizer, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with DatasetWriter(tmp_path / "set", vocab_size=300) as writer:
        writer.train.append(np.arange(5), [5], text_bytes=5)
        with pytest.raises(DataError, match="No space left on device"):
            finish(writer, stub_tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("token", [300, -1])
def test_an_id_outside_the_vocabulary_is_rejected(tmp_path, token):
    with (
        pytest.raises(DataError, match="states a vocabulary of 300"),
        DatasetWriter(tmp_path / "set", vocab_size=300) as writer,
    ):
        writer.train.append(np.array([1, token]), [2], text_bytes=2)
