import zlib
from itertools import pairwise

import numpy as np
import pytest

from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.prepare.pack import range_files
from flatout.data.prepare.plan import work_dir
from flatout.data.store.manifest import BLOCK_BYTES
from flatout.data.store.shards import Dataset
from flatout.errors import DataError
from flatout.storage import files

RNG = np.random.default_rng(0)


def finish(writer):
    return writer.finish(source={"kind": "test"}, split_rule="tail 0.1")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_dataset_contains_what_was_written(tmp_path, stub_tokenizer):
    with DatasetWriter(tmp_path / "a" / "b", stub_tokenizer) as writer:
        writer.append("train", np.arange(5), [2, 5], text_bytes=11)
        writer.append("val", np.arange(3), [3], text_bytes=7)
        manifest = finish(writer)
    dataset = Dataset.open(tmp_path / "a" / "b")
    assert dataset.manifest == manifest
    assert (manifest.tokens, manifest.documents, manifest.text_bytes, manifest.vocab_size) == (
        8,
        3,
        18,
        300,
    )
    assert (manifest.source, manifest.split_rule) == ({"kind": "test"}, "tail 0.1")
    assert (manifest.tokenizer.name, manifest.tokenizer.digest) == ("stub", stub_tokenizer.digest())
    assert sorted(contents(dataset.path)) == [
        "00000.bin",
        "00000.ends.bin",
        "manifest.json",
        "tokenizer.json",
    ]
    assert (
        contents(dataset.path)["00000.bin"] == np.array([0, 1, 2, 3, 4, 0, 1, 2], "<u2").tobytes()
    )
    assert contents(dataset.path)["00000.ends.bin"] == np.array([2, 5, 3], "<i8").tobytes()


def test_the_number_of_calls_does_not_matter(tmp_path, stub_tokenizer):
    tokens, mask = RNG.integers(0, 300, 1000), RNG.integers(0, 2, 1000)
    ends = np.array([100, 350, 351, 999])
    for name, cuts in {"whole": [0, 1000], "pieces": [0, 1, 100, 100, 350, 700, 1000]}.items():
        with DatasetWriter(tmp_path / name, stub_tokenizer, shard_tokens=64) as writer:
            for first, last in pairwise(cuts):
                inside = ends[(ends > first) & (ends <= last)] - first
                writer.append(
                    "train",
                    tokens[first:last],
                    inside,
                    text_bytes=last - first,
                    mask=mask[first:last],
                )
            finish(writer)
    whole, pieces = contents(tmp_path / "whole"), contents(tmp_path / "pieces")
    del whole["manifest.json"], pieces["manifest.json"]  # their shards' shares of the text differ
    assert whole == pieces
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
    with DatasetWriter(tmp_path / "set", stub_tokenizer) as writer:
        for _ in range(5):
            writer.append("train", RNG.integers(0, 300, BLOCK_BYTES // 4 - 3), [], text_bytes=1)
        entry = finish(writer).shards[0].tokens
    data = (tmp_path / "set" / entry.name).read_bytes()
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    assert len(blocks) == 3
    assert entry.block_crc32 == tuple(zlib.crc32(block) for block in blocks)


def test_an_error_leaves_no_files(tmp_path, stub_tokenizer):
    def interrupted():
        with DatasetWriter(tmp_path / "set", stub_tokenizer) as writer:
            writer.append("train", np.arange(5), [5], text_bytes=5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_the_directory_appears_only_when_complete(tmp_path, stub_tokenizer, monkeypatch):
    out = tmp_path / "set"
    seen = []
    original = work_dir.write_whole
    monkeypatch.setattr(
        work_dir, "write_whole", lambda *args: seen.append(out.exists()) or original(*args)
    )
    with DatasetWriter(out, stub_tokenizer) as writer:
        writer.append("train", np.arange(5), [5], text_bytes=5)
        assert not out.exists()
        finish(writer)
    assert seen == [False]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path, stub_tokenizer):
    killed = tmp_path / ".set.part"
    killed.mkdir()
    (killed / "00007.bin").write_bytes(b"old")
    with DatasetWriter(tmp_path / "set", stub_tokenizer) as writer:
        finish(writer)
    assert "00007.bin" not in contents(tmp_path / "set")


def test_an_empty_directory_is_filled(tmp_path, stub_tokenizer, monkeypatch):
    (tmp_path / "set").mkdir()
    monkeypatch.chdir(tmp_path / "set")
    with DatasetWriter(".", stub_tokenizer) as writer:
        finish(writer)
    assert Dataset.open(tmp_path / "set").manifest.tokens == 0


def test_a_full_disk_is_an_error(tmp_path, stub_tokenizer, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with DatasetWriter(tmp_path / "set", stub_tokenizer) as writer:
        writer.append("train", np.arange(5), [5], text_bytes=5)
        with pytest.raises(DataError, match="No space left on device"):
            finish(writer)
    assert list(tmp_path.iterdir()) == []


def test_val_is_held_in_a_file_when_it_is_large(tmp_path, stub_tokenizer, monkeypatch):
    monkeypatch.setattr(range_files, "HELD_BYTES", 100)
    tokens = RNG.integers(0, 300, 2000)
    with DatasetWriter(tmp_path / "set", stub_tokenizer) as writer:
        for start in range(0, 2000, 100):
            split = "val" if start % 200 else "train"
            writer.append(split, tokens[start : start + 100], [100], text_bytes=1)
        finish(writer)
    parts = tokens.reshape(20, 100)
    dataset = Dataset.open(tmp_path / "set")
    assert np.array_equal(dataset.split("train").read_tokens(0, 1000), parts[::2].reshape(-1))
    assert np.array_equal(dataset.split("val").read_tokens(0, 1000), parts[1::2].reshape(-1))
    assert dataset.split("val").document_ends.tolist() == list(range(100, 1001, 100))


@pytest.mark.parametrize("token", [300, -1])
def test_an_id_outside_the_vocabulary_is_rejected(tmp_path, token, stub_tokenizer):
    with (
        pytest.raises(DataError, match="states a vocabulary of 300"),
        DatasetWriter(tmp_path / "set", stub_tokenizer) as writer,
    ):
        writer.append("train", np.array([1, token]), [2], text_bytes=2)
