import hashlib
from contextlib import closing

import numpy as np
import pytest
import torch

from flatout.data.load.batches import BatchPlan, Shape, StepRead
from flatout.data.load.buckets import BucketedSteps, MixedSteps, row_lengths, rows_of
from flatout.data.load.loader import DirectLoader, PrefetchLoader
from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.store.shards import Dataset
from flatout.errors import DataError

T = 64
RNG = np.random.default_rng(0)


def plan(**changes):
    values = {"seq_len": T, "rows_per_device": 2, "accumulate": 2, "dp_rank": 0, "dp_size": 1}
    values |= {"seed": 7, "document_mask": False, "prefetch": 2, "device": "cpu"}
    return BatchPlan(**values | changes)


class StubTokenizer:
    """Enough of a tokenizer to write a dataset with."""

    name, eot_id = "stub", 0

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def save(self, path):
        path.write_bytes(b"{}")

    def digest(self):
        return hashlib.sha256(b"{}").hexdigest()


@pytest.fixture
def train_split(tmp_path):
    """Write and open one training split of tokens; documents end at `ends`."""

    def make(tokens, *, ends, mask=None, vocab_size=300, shard_tokens=1 << 26):
        out, tokens = tmp_path / "set", np.asarray(tokens)
        with DatasetWriter(out, StubTokenizer(vocab_size), shard_tokens=shard_tokens) as writer:
            writer.append("train", tokens, ends, text_bytes=4 * len(tokens), mask=mask)
            writer.finish(source={"kind": "test"}, split_rule="named")
        return Dataset.open(out).split("train")

    return make


@pytest.fixture
def documents(train_split):
    """Return a split of documents of some lengths, in which token i has the id i."""

    def make(lengths, **options):
        ends = np.cumsum(lengths)
        return train_split(np.arange(ends[-1]), ends=ends, vocab_size=65_536, **options)

    return make


def reading(reader, position):
    rows, seq_len = reader.shape_at(position)
    windows = np.full((rows * reader.plan.accumulate, seq_len + 1), 7, reader.dtype)
    mask = np.ones((rows * reader.plan.accumulate, seq_len), np.bool_)
    read = reader.read(position, windows, mask, None)
    assert read.position == position + 1
    if reader.plan.dp_size == 1 and not reader._split.has_mask:
        assert read == StepRead(position + 1, mask.sum(), mask.any(axis=1).sum(), position)
    return windows, mask


def targets_of(reader, epoch):
    steps = (reading(reader, epoch * reader.num_steps + step) for step in range(reader.num_steps))
    return np.concatenate([windows[:, 1:][mask] for windows, mask in steps])


def masks_of(reader):
    return [reading(reader, position)[1] for position in range(reader.num_steps)]


def wanted_of(lengths):
    """Return the targets of documents of some lengths."""
    ends = np.cumsum(lengths)
    starts = [end - length + 1 for length, end in zip(lengths, ends, strict=True)]
    return np.concatenate([np.arange(*each) for each in zip(starts, ends, strict=True)])


LENGTHS = RNG.integers(1, 200, 300)
WANTED = wanted_of(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("shard_tokens", [1 << 19, 500])
def test_every_target_is_read_once_per_epoch_in_a_new_order(documents, shard_tokens):
    reader = BucketedSteps(documents(LENGTHS, shard_tokens=shard_tokens), plan())
    epochs = [targets_of(reader, epoch) for epoch in range(3)]
    for found in epochs:
        assert np.array_equal(np.sort(found), WANTED)
    assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths",
    [[2], [1, 1, 2], [T + 1] * 9, [T + 2] * 3, [17] * 1000, [2, 500], [1, 33, 34, 65, 66, 129]],
)
@pytest.mark.parametrize("seq_len", [64, 20, 9])
def test_every_target_is_read_once_for_any_lengths(documents, lengths, seq_len):
    reader = BucketedSteps(documents(lengths), plan(seq_len=seq_len))
    assert np.array_equal(np.sort(targets_of(reader, 1)), wanted_of(lengths))


def test_a_row_is_one_document_padded_with_zeros(documents):
    lengths = RNG.integers(1, 200, 100)
    ends = np.cumsum(lengths)
    reader = BucketedSteps(documents(lengths), plan())
    for position in range(reader.num_steps):
        windows, mask = reading(reader, position)
        for row, counts in zip(windows.astype(int), mask, strict=True):
            size = int(counts.sum())
            assert counts[:size].all()
            assert not row[size + (size > 0) :].any()
            if size:
                assert np.array_equal(np.diff(row[: size + 1]), np.ones(size))
                first, last = np.searchsorted(ends, [row[0], row[size]], side="right")
                assert first == last


def test_there_are_few_shapes_with_equal_numbers_of_positions(documents):
    reader = BucketedSteps(documents(LENGTHS), plan(seq_len=128))
    assert reader.shapes == (Shape(2, 128), Shape(4, 64), Shape(8, 32), Shape(16, 16))
    seen = {reader.shape_at(position) for position in range(reader.num_steps)}
    assert seen == set(reader.shapes)


def test_only_the_last_step_of_the_longest_rows_is_not_full(documents):
    masks = masks_of(BucketedSteps(documents(LENGTHS), plan()))
    assert sum(not mask.any(axis=1).all() for mask in masks) <= 1


def test_short_documents_take_short_rows(documents):
    reader = BucketedSteps(documents(RNG.integers(2, 128, 900)), plan(seq_len=128))
    filled = np.mean([mask.mean() for mask in masks_of(reader)])
    assert filled > 0.72, "padded to the longest it would be half"


def of_ranks(split, world_size):
    """Return the readers of several ranks, of four micro-batches in all."""
    share = {"accumulate": 4 // world_size, "dp_size": world_size}
    return [BucketedSteps(split, plan(**share, dp_rank=rank)) for rank in range(world_size)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks_reads_the_same_rows_per_step(documents, world_size):
    split = documents(LENGTHS)
    (alone,), ranks = of_ranks(split, 1), of_ranks(split, world_size)
    for position in range(2 * alone.num_steps):
        whole, _ = reading(alone, position)
        shared = np.concatenate([reading(reader, position)[0] for reader in ranks])
        assert np.array_equal(np.sort(whole, axis=0), np.sort(shared, axis=0))


@pytest.mark.slow
def test_every_rank_reports_what_all_ranks_read(documents):
    split = documents(LENGTHS, mask=RNG.integers(0, 2, LENGTHS.sum()))
    (alone,), ranks = of_ranks(split, 1), of_ranks(split, 2)

    def read(reader):
        for position in range(alone.num_steps):
            rows, seq_len = reader.shape_at(position)
            windows = np.empty((rows * reader.plan.accumulate, seq_len + 1), reader.dtype)
            yield reader.read(position, windows, np.empty((len(windows), seq_len), np.bool_), None)

    whole = [*read(alone)]
    assert [[*read(reader)] for reader in ranks] == [whole, whole]
    assert sum(step.tokens for step in whole) == len(WANTED) == alone.tokens_per_epoch
    assert alone.steps_per_epoch == len(whole)


def test_the_plan_never_changes_silently(documents):
    split = documents([5, 40, 70, 12, 30, 64, 90, 3, 20, 33])
    reader = BucketedSteps(split, plan(rows_per_device=1))
    found = [reading(reader, position)[0][:, 0].tolist() for position in range(reader.num_steps)]
    assert found == [[285, 127, 0, 115], [221, 45], [5, 157], [314, 109, 311, 334]]


@pytest.mark.slow
@pytest.mark.parametrize("loader_class", [DirectLoader, PrefetchLoader])
def test_the_loader_reads_any_shape_and_can_seek(documents, loader_class):
    mask = RNG.integers(0, 2, LENGTHS.sum())
    reader = BucketedSteps(documents(LENGTHS, mask=mask), plan())
    with closing(loader_class(reader)) as loader:
        whole = [next(loader) for _ in range(reader.num_steps + 3)]
        loader.seek(5)
        again = next(loader)
    assert again.sequences_ABW.tolist() == whole[5].sequences_ABW.tolist()
    assert [batch.position for batch in whole] == list(range(1, reader.num_steps + 4))
    shapes = {tuple(batch.sequences_ABW.shape) for batch in whole}
    assert shapes == {(2, 2, 65), (2, 4, 33), (2, 8, 17)}
    parts = [micro for batch in whole[: reader.num_steps] for micro in batch.micro_batches()]
    targets = np.concatenate([part.targets_BT[part.targets_BT >= 0].numpy() for part in parts])
    assert np.array_equal(np.sort(targets), WANTED[mask[WANTED] != 0])
    assert all(micro.doc_ids_BT is None for micro in again.micro_batches())


def mixed(split, **changes):
    return MixedSteps(split, plan(by_tokens=True, **changes))


def totals(batch):
    return batch.tokens, batch.samples, batch.start, batch.position


def test_a_micro_batch_has_as_many_rows_as_its_tokens_allow_and_the_length_of_its_longest(
    documents,
):
    """Rows of 64, 32, 16, 16, 8, 5, 4 and 2 tokens, all in one step."""
    split = documents([17, 3, 65, 9, 6, 33, 5, 17])
    batch = next(DirectLoader(mixed(split, rows_per_device=1, accumulate=8)))
    assert batch.shapes == ((1, 64), (2, 32), (4, 16), (1, 2))
    micro = [*batch.micro_batches()]
    assert [tuple(each.tokens_BT.shape) for each in micro] == [*batch.shapes]
    assert batch.num_micro_batches == len(micro) == 4
    counts = [(each.targets_BT >= 0).sum(1).tolist() for each in micro]
    assert counts == [[64], [32, 16], [16, 8, 5, 4], [2]]
    assert (batch.tokens, batch.samples, batch.position) == (147, 8, 8)
    for each in micro:
        targets = each.targets_BT[each.targets_BT >= 0]
        assert (targets - each.tokens_BT[each.targets_BT >= 0] == 1).all()


def test_micro_batches_have_eight_lengths_for_each_power_of_two(documents):
    """A CPU keeps memory for each shape that it has seen."""
    reader = mixed(documents(range(2, 302)), seq_len=300, rows_per_device=1, accumulate=8)
    loader = DirectLoader(reader)
    found = {shape.seq_len for _ in range(100) for shape in next(loader).shapes}
    assert {length for length in found if length > 128} == {*range(144, 257, 16), 288, 300}


@pytest.mark.parametrize("rows_per_device", [1, 2, 4])
def test_every_division_of_a_step_reads_the_same_documents_once_per_epoch(
    documents, rows_per_device
):
    lengths = RNG.integers(2, 65, 40)
    reader = mixed(
        documents(lengths), rows_per_device=rows_per_device, accumulate=8 // rows_per_device
    )
    loader, epochs = DirectLoader(reader), []
    assert (reader.steps_per_epoch, reader.tokens_per_epoch) == (5, lengths.sum() - 40)
    for _ in range(2):
        steps = [next(loader) for _ in range(5)]
        for batch in steps:
            assert all(rows * seq_len <= rows_per_device * T for rows, seq_len in batch.shapes)
            assert batch.num_micro_batches <= 8 // rows_per_device
        micro = [part.targets_BT for batch in steps for part in batch.micro_batches()]
        epochs.append(np.concatenate([each[each >= 0].numpy() for each in micro]))
    assert all(np.array_equal(np.sort(found), wanted_of(lengths)) for found in epochs)
    assert not np.array_equal(*epochs)
    first = [where["documents"][0] for where in reader.data_at(0)]
    assert sorted(first) == sorted(
        where["documents"][0] for where in mixed(reader._split, accumulate=4).data_at(0)
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_have_micro_batches_of_the_same_shapes(documents, world_size):
    split = documents(LENGTHS)
    share = {"accumulate": 8 // world_size, "dp_size": world_size}
    alone = DirectLoader(mixed(split, accumulate=8))
    ranks = [DirectLoader(mixed(split, **share, dp_rank=rank)) for rank in range(world_size)]
    for _ in range(20):
        whole, parts = next(alone), [next(rank) for rank in ranks]
        assert len({part.shapes for part in parts}) == 1
        assert {*map(totals, parts)} == {totals(whole)}
        found = torch.cat([part.sequences_ABW.flatten(0, 1) for part in parts])
        assert sorted(found.tolist()) == sorted(whole.sequences_ABW.flatten(0, 1).tolist())
        valid = sum(int((m.targets_BT >= 0).sum()) for part in parts for m in part.micro_batches())
        assert valid == whole.tokens


def test_the_order_of_mixed_documents_never_changes_silently(documents):
    reader = mixed(documents([5, 40, 70, 12, 30, 64, 90, 3, 20, 33]), rows_per_device=1)
    loader = DirectLoader(reader)
    found = [next(loader).sequences_ABW[:, 0, 0].tolist() for _ in range(3)]
    assert found == [[5, 127], [109, 311], [334, 285]]


def test_rows_of_documents_start_at_documents_and_are_cut_at_seq_len():
    starts, sizes = rows_of(np.array([1, 3, 10, 19]), 4)
    assert (starts.tolist(), sizes.tolist()) == ([1, 3, 7, 10, 14], [1, 4, 2, 4, 4])
    lengths = {1024: [128, 256, 512, 1024], 64: [16, 32, 64], 30: [30], 33: [33]}
    assert {seq_len: row_lengths(seq_len) for seq_len in lengths} == lengths


def test_a_split_without_documents_of_two_tokens_is_rejected(train_split):
    with pytest.raises(DataError, match="no document of two or more tokens"):
        BucketedSteps(train_split([1, 2], ends=[1, 2]), plan())
