import numpy as np
import pytest
import torch

from flatout.data.load.batches import ShardReader
from flatout.data.load.loader import evaluation_batches

RNG = np.random.default_rng(0)


def evaluated(split, world_size=1, **kwargs):
    """Return the batches of all ranks, which all have the same number."""
    values = {"seq_len": 8, "rows": 3, "device": "cpu", "reader": ShardReader(), **kwargs}
    ranks = [
        list(evaluation_batches(split, dp_rank=rank, dp_size=world_size, **values))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    return [micro for together in zip(*ranks, strict=True) for micro in together]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [2, 3, 8, 9, 10, 17, 24, 25, 26, 100, 193, 200])
def test_evaluation_takes_every_target_once(train_split, num_tokens, world_size):
    tokens = RNG.integers(0, 300, num_tokens)
    batches = evaluated(train_split(tokens), world_size)
    assert {tuple(micro.tokens_BT.shape) for micro in batches} == {(3, 8)}
    counted = [
        (micro.tokens_BT[micro.targets_BT >= 0], micro.targets_BT[micro.targets_BT >= 0])
        for micro in batches
    ]
    assert torch.cat([inputs for inputs, _ in counted]).tolist() == tokens[:-1].tolist()
    assert torch.cat([targets for _, targets in counted]).tolist() == tokens[1:].tolist()
    assert all((micro.tokens_BT >= 0).all() for micro in batches)


@pytest.mark.parametrize("max_tokens", [1, 7, 8, 9, 50, 98, 99, 100, 1000])
def test_max_tokens_limits_the_targets(train_split, max_tokens):
    tokens = RNG.integers(0, 300, 100)
    for world_size in (1, 2):
        batches = evaluated(
            train_split(tokens, name=f"set{world_size}"), world_size, max_tokens=max_tokens
        )
        targets = torch.cat([micro.targets_BT[micro.targets_BT >= 0] for micro in batches])
        assert targets.tolist() == tokens[1 : max_tokens + 1].tolist()


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_split_without_targets_yields_nothing(train_split, num_tokens):
    assert evaluated(train_split(np.zeros(num_tokens, int), ends=[1] * num_tokens)) == []


def test_evaluation_applies_the_mask_and_the_documents(train_split):
    tokens, mask = RNG.integers(0, 300, 60), RNG.integers(0, 2, 60)
    ends = np.array([5, 30, 44, 60])
    batches = evaluated(train_split(tokens, ends=ends, mask=mask), document_mask=True)
    targets = torch.cat([micro.targets_BT.flatten() for micro in batches])[:59]
    assert targets.tolist() == np.where(mask[1:] != 0, tokens[1:], -1).tolist()
    documents = np.searchsorted(ends, np.arange(60), side="right")
    doc_ids = torch.cat([micro.doc_ids_BT for micro in batches])[:7]
    for row in range(7):
        assert (
            doc_ids[row].tolist()
            == (documents[row * 8 : row * 8 + 8] - documents[row * 8]).tolist()
        )


def test_sequences_without_a_target_that_counts_are_left_out(train_split):
    mask = np.zeros(100, int)
    mask[[44, 45, 99]] = 1
    split = train_split(np.arange(100), mask=mask)
    batches = evaluated(split, world_size=2)
    targets = torch.cat([micro.targets_BT.flatten() for micro in batches])
    assert targets[targets >= 0].tolist() == [44, 45, 99]
    assert sum((micro.tokens_BT.any(dim=1)).sum().item() for micro in batches) == 2
    first = torch.cat([micro.targets_BT.flatten() for micro in evaluated(split, max_tokens=3)])
    assert first[first >= 0].tolist() == [44, 45], "the first row with a target, all of it"


def test_a_split_whose_mask_excludes_every_target_yields_nothing(train_split):
    assert evaluated(train_split(np.arange(100), mask=np.zeros(100, int))) == []
