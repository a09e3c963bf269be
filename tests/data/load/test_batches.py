import numpy as np
import pytest
from plans import batch_plan

from flatout.data.load import batches
from flatout.data.load.batches import SequenceSteps, Shape, ShardReader
from flatout.data.store.order import shuffled
from flatout.errors import DataError

TOKENS = np.arange(8 * 37 + 3)


def plan(**changes):
    return batch_plan(**{"accumulate": 3} | changes)


def first_tokens(reader, position):
    rows, seq_len = reader.shape_at(position)
    sequences_NW = np.empty((rows * reader.plan.accumulate, seq_len + 1), reader.dtype)
    read = reader.read(position, sequences_NW, None, None)
    sequences = reader.plan.sequences_per_step
    assert (read.tokens, read.samples) == (8 * sequences, sequences)
    return (sequences_NW[:, 0] // 8).tolist(), read.position


@pytest.mark.parametrize("lookahead", [1, 13, 4096])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_lookahead_changes_nothing(train_split, monkeypatch, lookahead, world_size):
    monkeypatch.setattr(batches, "LOOKAHEAD", lookahead)
    split = train_split(TOKENS)
    for rank in range(world_size):
        own = plan(dp_size=world_size, dp_rank=rank)
        reader = SequenceSteps(split, own, ShardReader())
        a_step = own.sequences_per_step
        for position in (
            *range(0, 20 * a_step, a_step),
            3 * a_step,
            5,
            10**12,
            10**12 + a_step,
            4,
            0,
        ):
            rows = position + own.row_indices(own.rows_per_device)
            wanted = shuffled(rows, 37, seed=7).tolist()
            assert first_tokens(reader, position) == (wanted, position + a_step)


def test_the_order_is_computed_once_for_many_steps(train_split, monkeypatch):
    split = train_split(TOKENS)
    asked = []
    monkeypatch.setattr(
        split,
        "sequences_at",
        lambda positions, *rest, **options: (
            asked.append(len(positions))
            or type(split).sequences_at(split, positions, *rest, **options)
        ),
    )
    reader = SequenceSteps(split, plan(), ShardReader())
    position = 0
    for _ in range(1365):
        position = first_tokens(reader, position)[1]
    assert asked == [8190]
    first_tokens(reader, position)
    assert asked == [8190, 8190]


def test_one_shape(train_split):
    reader = SequenceSteps(train_split(TOKENS), plan(), ShardReader())
    assert (reader.steps_per_epoch, reader.tokens_per_epoch) == (37 / 6, 37 * 8)
    assert reader.shapes == (Shape(2, 8),)
    assert reader.shape_at(12345) == Shape(2, 8)


def test_row_indices_are_divided_among_ranks_for_any_rows():
    for rows in (1, 2, 5):
        indices = [plan(dp_size=2, dp_rank=rank).row_indices(rows) for rank in range(2)]
        assert sorted(np.concatenate(indices).tolist()) == list(range(3 * 2 * rows))
        assert indices[1][:rows].tolist() == list(range(rows, 2 * rows))


def test_a_split_shorter_than_one_sequence_is_rejected(train_split):
    short = r"has 8 tokens. One sequence of data\.seq_len=8 needs 9.*data\.seq_len=7"
    with pytest.raises(DataError, match=short):
        SequenceSteps(train_split(np.arange(8)), plan(), ShardReader())
    for tokens in ([], [7]):  # one token is no target
        split = train_split(tokens, ends=[1] * len(tokens), name=f"of {len(tokens)}")
        with pytest.raises(DataError, match="Prepare more text: the train split is empty"):
            SequenceSteps(split, plan(), ShardReader())
    SequenceSteps(train_split(np.arange(9), name="enough"), plan(), ShardReader())
