import contextlib

import numpy as np
import pytest

from flatout.data.prepare import join as joining
from flatout.data.prepare.join import check_files, join
from flatout.data.prepare.pack.range_files import RangeWriter
from flatout.data.prepare.plan.work_dir import WorkDir
from flatout.data.store.shards import Dataset
from flatout.storage.files import Unfinished

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 300, 1000)
MASK = RNG.integers(0, 2, 1000)
ENDS = np.array([100, 350, 351, 999, 1000])


@pytest.fixture
def work(tmp_path):
    with WorkDir(tmp_path / "set") as folder:
        folder.make()
        yield folder


def write_ranges(work, cuts, mask=None):
    """Write the tokens in ranges that end at the cuts, and the last hundred again as validation."""
    records = []
    for number, (first, last) in enumerate(zip([0, *cuts], cuts, strict=False)):
        writer = RangeWriter(work.ranges, number, vocab_size=300)
        if last > first:
            inside = ENDS[(first < ENDS) & (last >= ENDS)] - first
            writer.splits["train"].append(
                TOKENS[first:last],
                inside,
                text_bytes=last - first,
                mask=None if mask is None else mask[first:last],
            )
        if last == 1000:
            writer.splits["val"].append(
                TOKENS[900:], [100], text_bytes=7, mask=None if mask is None else mask[900:]
            )
        records.append(writer.finish())
    return records


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def joined(work, records, tokenizer):
    join(work, records, tokenizer, source={}, split_rule="none", shard_bytes=256)
    return contents(work.target)


@pytest.mark.parametrize("mask", [None, MASK], ids=["plain", "masked"])
def test_bytes_do_not_depend_on_the_ranges(tmp_path, stub_tokenizer, mask):
    made = []
    for name, cuts in {
        "one": [1000],
        "documents": [100, 350, 351, 999, 1000],
        "empty ranges": [100, 100, 351, 351, 999, 1000],
    }.items():
        with WorkDir(tmp_path / name) as work:
            work.make()
            made.append(joined(work, write_ranges(work, cuts, mask), stub_tokenizer))
    assert made[0] == made[1] == made[2]
    dataset = Dataset.open(tmp_path / "one")
    assert np.array_equal(dataset.split("train").read_tokens(0, 1000), TOKENS)
    assert dataset.split("train").document_ends.tolist() == ENDS.tolist()
    assert len(dataset.manifest.splits["train"].shards) == 8
    if mask is not None:
        assert np.array_equal(dataset.split("train").read_mask_range(0, 1000), mask)


def test_an_interrupted_join_resumes_with_the_same_result(
    work, stub_tokenizer, monkeypatch, tmp_path
):
    cuts = [100, 351, 999, 1000]
    with WorkDir(tmp_path / "whole") as other:
        other.make()
        wanted = joined(other, write_ranges(other, cuts), stub_tokenizer)
    records = write_ranges(work, cuts)
    close = joining.CheckedFile.close
    closed = []

    def stops(file, after):
        closed.append(file)
        if len(closed) == after:
            raise OSError(28, "No space left on device")
        return close(file)

    times = 0
    for after in range(1, 40):
        closed.clear()
        monkeypatch.setattr(
            joining.CheckedFile, "close", lambda file, after=after: stops(file, after)
        )
        with contextlib.suppress(Unfinished):
            join(work, records, stub_tokenizer, source={}, split_rule="none", shard_bytes=256)
            break
        times += 1
        assert not work.target.exists()
        assert not list(work.joined.glob("*.part")), "no unfinished files"
    assert times >= 3
    assert contents(work.target) == wanted
    assert not work.path.exists()


def test_ranges_are_removed_once_their_tokens_are_in_shards(work, stub_tokenizer, monkeypatch):
    records = write_ranges(work, [100, 351, 999, 1000])
    left = []
    copied = joining._write_shard

    def looked(*arguments):
        left.append(len(list(work.ranges.glob("*.train.bin"))))
        return copied(*arguments)

    monkeypatch.setattr(joining, "_write_shard", looked)
    joined(work, records, stub_tokenizer)
    assert left[:8] == [4, 3, 3, 2, 2, 2, 2, 2]


def test_a_damaged_range_is_packed_again(work, stub_tokenizer):
    records = write_ranges(work, [100, 351, 999, 1000])
    check_files(work, records)
    with (work.ranges / "000001.train.bin").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(Unfinished, match="1 of 4 ranges"):
        check_files(work, records)
    assert sorted(work.done()) == [0, 2, 3]


@pytest.mark.parametrize(
    "spoil", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:50])]
)
def test_a_missing_range_is_packed_again(work, stub_tokenizer, spoil):
    records = write_ranges(work, [100, 351, 999, 1000])
    spoil(work.ranges / "000001.train.bin")
    with pytest.raises(Unfinished, match=r"000001\.train\.bin was damaged"):
        join(work, records, stub_tokenizer, source={}, split_rule="none", shard_bytes=256)
    assert sorted(work.done()) == [0, 2, 3]
    assert not work.target.exists()
