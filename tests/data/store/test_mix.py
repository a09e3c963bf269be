"""Mixes: exact shares, each dataset in its own order, the right masks and documents."""

import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import batch_plan

from flatout.config.sections import DataConfig
from flatout.data.load.batches import SequenceSteps, ShardReader
from flatout.data.load.loader import DirectLoader, PrefetchLoader
from flatout.data.store.mix import (
    LONGEST_PERIOD,
    MixedDataset,
    deal_turns,
    distinct_names,
    members_of,
    open_data,
    whole_turns,
)
from flatout.errors import ConfigError, DataError

T = 8


def plan(**changes):
    return batch_plan(**{"document_mask": True, "seed": 3} | changes)


@pytest.fixture
def three(write_set):
    """Three datasets of 30, 10 and 5 sequences with distinct tokens. The second has a mask."""
    first, second, third = np.arange(241), 1000 + np.arange(81), 2000 + np.arange(41)
    mask = (np.arange(81) % 3 > 0).astype(np.uint8)
    return {
        str(write_set(first, vocab_size=4000, name="a")): 5,
        str(write_set(second, vocab_size=4000, name="b", mask=mask, ends=[20, 81])): 2,
        str(write_set(third, vocab_size=4000, name="c", val=[7, 8, 9])): 1,
    }


def named(weights):
    return {f"data/{number}": weight for number, weight in enumerate(weights)}


def read(split, indices):
    out = np.empty((len(indices), T + 1), split.dtype)
    split.read_sequences(np.asarray(indices), T, out)
    return out


@pytest.mark.slow
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
@settings(deadline=None)
def test_no_dataset_is_ever_a_whole_sequence_off_its_share(turns):
    order = deal_turns(tuple(turns))
    counts = np.cumsum(order[:, np.newaxis] == np.arange(len(turns)), axis=0)
    due = np.arange(1, len(order) + 1)[:, np.newaxis] * np.asarray(turns) / sum(turns)
    assert counts[-1].tolist() == list(turns)
    assert np.abs(counts - due).max() < 1


@pytest.mark.slow
@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8))
def test_turns_are_in_the_ratio_of_the_weights(weights):
    shares = np.asarray(weights) / sum(weights)
    assume(shares.min() > 1.001 / LONGEST_PERIOD)
    turns = np.asarray(whole_turns(named(weights)), float)
    assert turns.min() >= 1
    assert np.abs(turns / turns.sum() - shares).max() <= (len(weights) + 1) / LONGEST_PERIOD


@pytest.mark.parametrize(
    ("weights", "turns"),
    [
        ([3, 1], (3, 1)),
        ([0.7, 0.3], (7, 3)),
        ([1e-2, 2e-2], (1, 2)),
        ([50, 50, 50], (1, 1, 1)),
        ([2.5], (1,)),
        ([0.1, 0.2, 0.7], (1, 2, 7)),
    ],
)
def test_plain_ratios_are_exact(weights, turns):
    assert whole_turns(named(weights)) == turns


def test_an_odd_ratio_is_rounded():
    assert sum(whole_turns(named([123_457, 7_654_321]))) == LONGEST_PERIOD


@pytest.mark.parametrize(
    ("least", "others"), [(1e-9, 1.0), (1, 65_536), (1, 1e6), (1e-12, 3e-7), (0.5, 7e9)]
)
def test_a_share_that_is_too_small_is_rejected_with_a_sufficient_weight(least, others):
    with pytest.raises(
        ConfigError, match=r"data/least the weight .* smallest share is 1 sequence in 65,536\."
    ) as refused:
        whole_turns({"data/least": least, "data/most": others})
    enough = float(refused.value.fix.split()[5])
    assert least < enough
    assert whole_turns({"data/least": enough, "data/most": others})[0] == 1
    assert whole_turns({"data/least": 1, "data/most": LONGEST_PERIOD - 1}) == (
        1,
        LONGEST_PERIOD - 1,
    )


def test_the_order_never_changes_silently():
    assert deal_turns((3, 1)).tolist() == [0, 0, 0, 1]
    assert deal_turns((5, 2, 1)).tolist() == [0, 0, 1, 0, 0, 1, 0, 2]
    assert deal_turns((1, 1, 1)).tolist() == [0, 1, 2]


def test_each_dataset_keeps_its_own_order_and_epochs(three):
    """A mix reads a dataset in the same order as a run on that dataset alone."""
    mixed = MixedDataset.open(three)
    split = mixed.split("train")
    windows = read(split, split.sequences_at(np.arange(800), T, seed=3))
    for part, start, count in zip(mixed.members, (0, 1000, 2000), (500, 200, 100), strict=True):
        mine = windows[windows[:, 0] // 1000 == start // 1000]
        alone = part.dataset.split("train")
        assert len(mine) == count == round(800 * part.share)
        assert np.array_equal(mine, read(alone, alone.sequences_at(np.arange(count), T, seed=3)))


def test_a_position_does_not_depend_on_the_others_in_the_call(three):
    split = MixedDataset.open(three).split("train")
    together = split.sequences_at(np.arange(100), T, seed=9)
    assert together.tolist() == [
        int(split.sequences_at(np.array([p]), T, seed=9)[0]) for p in range(100)
    ]
    far = np.arange(10**12, 10**12 + 16)
    assert (
        split.sequences_at(far, T, seed=9)[5:].tolist()
        == split.sequences_at(far[5:], T, seed=9).tolist()
    )
    assert split.sequences_at(far, T, seed=9).max() < split.num_sequences(T) == 45


@pytest.mark.parametrize("loader_class", [DirectLoader, PrefetchLoader])
def test_masks_and_documents_follow_their_sequences(three, loader_class):
    with closing(
        loader_class(SequenceSteps(MixedDataset.open(three).split("train"), plan(), ShardReader()))
    ) as loader:
        batches = [next(loader) for _ in range(12)]
    windows = torch.cat([batch.sequences_ABW.flatten(0, 1).int() for batch in batches]).numpy()
    mask = torch.cat([batch.mask_ABT.flatten(0, 1) for batch in batches]).numpy()
    doc_ids = torch.cat([batch.doc_ids_ABT.flatten(0, 1) for batch in batches]).numpy()
    of_second = windows[:, 0] // 1000 == 1
    assert mask[~of_second].all()
    assert np.array_equal(mask[of_second], (windows[of_second, 1:] - 1000) % 3 > 0)
    inputs = windows[:, :-1]
    assert np.array_equal(
        doc_ids, np.where((inputs >= 1020) & (inputs < 2000) & (inputs[:, :1] < 1020), 1, 0)
    )


def test_a_dataset_shorter_than_one_sequence_is_named(three):
    split = MixedDataset.open(three).split("train")
    with pytest.raises(DataError, match=r"/c has 41 tokens.*data\.seq_len=64.*Remove it"):
        split.num_sequences(64)


def test_different_tokenizers_are_rejected_with_the_command_that_unifies_them(write_set, three):
    path = write_set(np.arange(100), vocab_size=300, name="other")
    with pytest.raises(
        DataError,
        match=r"different tokenizers.*Prepare the second again with the tokenizer of the first: "
        r"--tokenizer .*a/tokenizer\.json",
    ):
        MixedDataset.open({**three, str(path): 1})


def test_one_directory_named_twice_is_rejected(three):
    path = next(iter(three))
    with pytest.raises(ConfigError, match="twice"):
        MixedDataset.open({path: 1, f"{path}/../a": 1})


def test_the_configured_datasets_are_opened(three):
    path = next(iter(three))
    assert [part.name for part in members_of(open_data(DataConfig(mix=three)))] == ["a", "b", "c"]
    assert [(part.name, part.share) for part in members_of(open_data(DataConfig(path=path)))] == [
        ("a", 1.0)
    ]
    with pytest.raises(ConfigError, match="nothing to train on"):
        open_data(DataConfig())


def test_names_are_as_long_as_needed_to_differ(tmp_path):
    assert distinct_names([tmp_path / "book", tmp_path / "code"]) == ["book", "code"]
    assert distinct_names([tmp_path / "x" / "train", tmp_path / "y" / "train"]) == [
        "x/train",
        "y/train",
    ]
    assert distinct_names([tmp_path]) == [tmp_path.name]


FEW_FILES = """
import resource, sys
import numpy as np
soft, hard = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from flatout.config.sections import DataConfig
from flatout.data.store.mix import open_data
from flatout.errors import DataError
try:
    mix = open_data(DataConfig(mix={path: 1.0 for path in sys.argv[3:]}))
    for member in mix.members:
        split = member.dataset.split("train")
        split.read_sequences(np.array([0]), 4, np.zeros((1, 5), split.dtype))
    print("read", len(mix.members))
except DataError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("soft", "hard", "said"), [(40, 4096, "read 50"), (40, 40, "Too many open files")]
)
def test_a_mix_of_many_datasets_raises_the_limit_of_open_files(write_set, soft, hard, said):
    paths = [str(write_set(range(40), name=f"set{number}")) for number in range(50)]
    words = [sys.executable, "-c", FEW_FILES, str(soft), str(hard), *paths]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    if hard == soft:
        assert "may open 40 files here" in done.stdout
        assert "ulimit -n" in done.stdout
