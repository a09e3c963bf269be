import os

import numpy as np
import pytest

from flatout.data.store import sharded_array
from flatout.data.store.manifest import BLOCK_BYTES
from flatout.data.store.shards import Dataset
from flatout.errors import DataError

RNG = np.random.default_rng(0)


def flip(path, byte):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def read(split, seq_len, indices=None):
    indices = np.arange(split.num_sequences(seq_len)) if indices is None else np.asarray(indices)
    out = np.empty((len(indices), seq_len + 1), split.dtype)
    split.read_sequences(indices, seq_len, out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("shard_tokens", [1 << 19, 100, 15, 5])
@pytest.mark.parametrize("seq_len", [1, 7, 10, 64])
def test_sequences_contain_the_right_tokens_across_shard_boundaries(
    train_split, shard_tokens, seq_len
):
    tokens = RNG.integers(0, 300, 301)
    split = train_split(tokens, shard_tokens=shard_tokens)
    indices = RNG.permutation(split.num_sequences(seq_len))
    wanted = np.stack([tokens[i * seq_len : i * seq_len + seq_len + 1] for i in indices])
    assert np.array_equal(read(split, seq_len, indices), wanted)


@pytest.mark.parametrize(
    ("num_tokens", "seq_len", "wanted"),
    [(0, 4, 0), (1, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2)],
)
def test_only_whole_sequences_count(train_split, num_tokens, seq_len, wanted):
    assert (
        train_split(
            np.zeros(num_tokens, int), ends=[num_tokens] if num_tokens else []
        ).num_sequences(seq_len)
        == wanted
    )


def test_counts_and_ranges(train_split):
    split = train_split(np.arange(100), ends=[10, 40, 100], shard_tokens=32)
    assert (split.num_tokens, split.num_documents, split.text_bytes, split.has_mask) == (
        100,
        3,
        400,
        False,
    )
    assert split.document_ends.tolist() == [10, 40, 100]
    assert split.read_tokens(30, 70).tolist() == list(range(30, 70))
    assert split.read_tokens(100, 100).tolist() == []
    place = {"shard": "00000.bin", "token": 20, "documents": [1, 2]}
    assert split.locate(1, 20) == {"sequence": 1, "dataset": str(split.folder), **place}


def test_val_follows_train_in_a_shard(write_set):
    tokens = RNG.integers(0, 300, 170)
    mask = RNG.integers(0, 2, 100)
    folder = write_set(tokens[:100], tokens[100:], ends=[10, 40, 100], mask=mask, shard_tokens=64)
    stored = np.concatenate([np.fromfile(folder / f"0000{n}.bin", "<u2") for n in range(3)])
    assert np.array_equal(stored, tokens)
    dataset = Dataset.open(folder)
    train, val = dataset.split("train"), dataset.split("val")
    assert np.array_equal(train.read_tokens(0, 100), tokens[:100])
    assert np.array_equal(val.read_tokens(0, 70), tokens[100:])
    assert np.array_equal(train.read_mask_range(0, 100), mask)
    assert val.read_mask_range(0, 70).all()
    assert (train.document_ends.tolist(), val.document_ends.tolist()) == ([10, 40, 100], [70])
    assert val.locate(5, 10)["shard"] == "00002.bin"
    assert val.locate(5, 10)["token"] == 150 - 128


def test_a_damaged_block_stops_only_the_split_that_reads_it(write_set):
    per_block = BLOCK_BYTES // 2
    folder = write_set(np.zeros(per_block + 5, int), np.zeros(per_block, int))
    flip(folder / "00000.bin", 2 * BLOCK_BYTES + 1)
    dataset = Dataset.open(folder)
    assert not dataset.split("train").read_tokens(0, per_block + 5).any()
    with pytest.raises(DataError, match=f"byte {2 * BLOCK_BYTES}: .*checksum"):
        dataset.split("val").read_tokens(per_block - 5, per_block)


def test_a_missing_split_is_empty(write_set):
    val = Dataset.open(write_set(np.arange(10))).split("val")
    assert (
        val.num_tokens,
        val.num_documents,
        val.num_sequences(4),
        val.document_ends.tolist(),
    ) == (0, 0, 0, [])


def test_reading_beyond_the_end_is_rejected(train_split):
    split = train_split(np.arange(100))
    with pytest.raises(DataError, match="There are 100"):
        read(split, 10, [9, 10])
    with pytest.raises(DataError, match="num_sequences"):
        read(split, 10, [-1])


@pytest.mark.parametrize("shard_tokens", [1 << 19, 16])
def test_the_mask_is_that_of_the_targets(train_split, shard_tokens):
    mask = RNG.integers(0, 2, 101).astype(np.uint8)
    split = train_split(np.arange(101), mask=mask, shard_tokens=shard_tokens)
    assert split.has_mask
    out = np.empty((4, 25), np.bool_)
    split.read_mask(np.array([3, 0, 2, 1]), 25, out)
    assert out.tolist() == [(mask[i * 25 + 1 : i * 25 + 26] != 0).tolist() for i in (3, 0, 2, 1)]
    assert split.read_mask_range(5, 20).tolist() == (mask[5:20] != 0).tolist()


def test_document_ids_count_from_zero_in_each_sequence(train_split):
    ends = np.unique(np.append(RNG.integers(1, 1000, 120), 1001))
    split = train_split(np.zeros(1001, int), ends=ends)
    for seq_len in (1, 7, 50, 1000):
        indices = RNG.permutation(split.num_sequences(seq_len))
        out = np.full((len(indices), seq_len), -9, np.int32)
        split.read_document_ids(indices, seq_len, out)
        documents = np.searchsorted(ends, np.arange(1001), side="right")
        wanted = [
            documents[i * seq_len : i * seq_len + seq_len] - documents[i * seq_len] for i in indices
        ]
        assert np.array_equal(out, np.stack(wanted))


@pytest.mark.parametrize("name", ["00001.bin", "00003.ends.bin", "00002.mask.bin"])
def test_sizes_are_checked_when_a_directory_is_opened(write_set, name):
    folder = write_set(np.arange(100), mask=np.ones(100), shard_tokens=32)
    whole = (folder / name).read_bytes()
    for torn in (whole[:-1], whole + b"x"):
        (folder / name).write_bytes(torn)
        with pytest.raises(
            DataError, match=rf"{name} has {len(torn)} bytes, not {len(whole)}\..*prepare"
        ):
            Dataset.open(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        Dataset.open(folder)


def test_the_tokenizer_is_compared_with_the_manifest_when_a_directory_is_opened(write_set):
    path = write_set(np.arange(100)) / "tokenizer.json"
    flip(path, 5)
    with pytest.raises(DataError, match=r"tokenizer\.json is damaged.*Restore it from a copy"):
        Dataset.open(path.parent)


def test_a_damaged_block_is_named_when_first_read(write_set):
    per_block = BLOCK_BYTES // 2
    tokens = RNG.integers(0, 300, 3 * per_block + 11)
    folder = write_set(tokens, shard_tokens=BLOCK_BYTES)
    flip(folder / "00001.bin", BLOCK_BYTES + 7)  # block 3 of the split, block 1 of its shard
    split = Dataset.open(folder).split("train")
    assert np.array_equal(split.read_tokens(0, 3 * per_block), tokens[: 3 * per_block])
    with pytest.raises(
        DataError, match=rf"00001\.bin, byte {BLOCK_BYTES}: .*checksum.*flatout prepare"
    ):
        split.read_tokens(3 * per_block - 1, 3 * per_block + 1)
    with pytest.raises(
        DataError, match="checksum"
    ):  # and again: a failed block never counts as checked
        split.read_tokens(0, len(tokens))


def test_a_read_across_blocks_checks_those_in_the_middle(write_set):
    folder = write_set(np.zeros(2 * BLOCK_BYTES, int))
    flip(folder / "00000.bin", BLOCK_BYTES + 5)
    with pytest.raises(DataError, match=f"byte {BLOCK_BYTES}:"):
        Dataset.open(folder).split("train").read_tokens(0, 2 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("name", "read"),
    [("ends", lambda s: s.document_ends), ("mask", lambda s: s.read_mask_range(0, 2))],
)
def test_document_ends_and_masks_are_checked_too(write_set, name, read):
    folder = write_set(np.arange(100), mask=np.ones(100))
    flip(folder / f"00000.{name}.bin", 0)
    with pytest.raises(DataError, match=f"00000.{name}.bin, byte 0"):
        read(Dataset.open(folder).split("train"))


def test_each_block_is_checked_once(write_set, monkeypatch):
    split = Dataset.open(write_set(np.zeros(BLOCK_BYTES, int), vocab_size=10)).split("train")
    checked = []
    original = sharded_array.zlib.crc32
    monkeypatch.setattr(
        sharded_array.zlib, "crc32", lambda data: checked.append(len(data)) or original(data)
    )
    for _ in range(3):
        read(split, 1000, [0, 1, 2])
    assert len(checked) == 1
    read(split, 1000)
    read(split, 1000)
    assert len(checked) == 2


def test_the_first_of_several_damaged_blocks_is_named(write_set):
    folder = write_set(np.zeros(2 * BLOCK_BYTES, int), shard_tokens=BLOCK_BYTES // 2)
    for number in (3, 1):
        flip(folder / f"0000{number}.bin", 5)
    split = Dataset.open(folder).split("train")
    for _ in range(2):
        with pytest.raises(DataError, match=r"00001\.bin, byte 0"):
            read(split, 1000)


@pytest.mark.parametrize("length", [0, 10, BLOCK_BYTES + 10, 2 * BLOCK_BYTES + 2])
@pytest.mark.parametrize("touched", [True, False], ids=["in use", "not yet touched"])
def test_a_shard_resized_while_open_is_named(write_set, length, touched, monkeypatch):
    monkeypatch.setattr(sharded_array, "SIZE_CHECK_INTERVAL_S", 0.0)
    folder = write_set(np.zeros(BLOCK_BYTES, int))
    split = Dataset.open(folder).split("train")
    if touched:
        read(split, 1000)
    os.truncate(folder / "00000.bin", length)
    with pytest.raises(
        DataError, match=rf"00000\.bin now has {length} bytes. It had {2 * BLOCK_BYTES} when"
    ):
        read(split, 1000)


def test_a_shard_deleted_while_open_is_still_read(train_split):
    split = train_split(np.arange(100))
    before = read(split, 10)
    (split.folder / "00000.bin").unlink()
    assert np.array_equal(read(split, 10), before)


def test_a_shard_deleted_before_it_is_opened_is_named(train_split):
    split = train_split(np.arange(100))
    (split.folder / "00000.bin").unlink()
    with pytest.raises(DataError, match=r"No such file.*00000\.bin"):
        read(split, 10)


def test_a_block_that_cannot_be_read_is_named(train_split, monkeypatch):
    split = train_split(np.arange(100))
    shards_open = type(split.folder).open

    def failing(path, mode="r", **options):
        if path.name == "00000.bin" and split._tokens.__dict__.get("_maps"):
            raise OSError(5, "Input/output error")
        return shards_open(path, mode, **options)

    monkeypatch.setattr(type(split.folder), "open", failing)
    with pytest.raises(
        DataError,
        match=r"00000\.bin, byte 0: the 200-byte block at this offset cannot be read: "
        "Input/output error",
    ):
        read(split, 10)
