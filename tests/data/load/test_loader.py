import gc
import subprocess
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from plans import batch_plan

from flatout.data.load.batches import SequenceSteps, ShardReader
from flatout.data.load.loader import DirectLoader, PrefetchLoader
from flatout.data.store.order import shuffled
from flatout.errors import DataError

RNG = np.random.default_rng(0)
LOADERS = [DirectLoader, PrefetchLoader]


def plan(**changes):
    return batch_plan(**{"accumulate": 3} | changes)


def read_steps(loader_class, split, steps, start=0, **changes):
    with closing(loader_class(SequenceSteps(split, plan(**changes), ShardReader()))) as loader:
        loader.seek(start)
        return [next(loader) for _ in range(steps)]


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "flatout-loader"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert loader_threads() == []


@pytest.mark.parametrize("loader_class", LOADERS)
def test_steps_follow_the_closed_form_order(train_split, loader_class):
    tokens = RNG.integers(0, 300, 801)
    split = train_split(tokens, shard_tokens=150)
    batches = read_steps(loader_class, split, 30)  # 180 sequences of 100: two epochs
    order = shuffled(np.arange(180), 100, seed=7)
    wanted = np.stack([tokens[w * 8 : w * 8 + 9] for w in order]).reshape(30, 3, 2, 9)
    assert np.array_equal(torch.stack([b.sequences_ABW for b in batches]).numpy(), wanted)
    assert [b.position for b in batches] == list(range(6, 181, 6))
    assert all(b.wait_ms >= 0 for b in batches)
    assert all(b.mask_ABT is None and b.doc_ids_ABT is None for b in batches)


@pytest.mark.parametrize("loader_class", LOADERS)
def test_micro_batches_shift_once_and_are_contiguous_int64(train_split, loader_class):
    split = train_split(np.arange(300))
    (batch,) = read_steps(loader_class, split, 1)
    assert batch.sequences_ABW.dtype == torch.uint16
    micro = list(batch.micro_batches())
    assert len(micro) == 3
    for a, one in enumerate(micro):
        assert one.tokens_BT.dtype == one.targets_BT.dtype == torch.int64
        assert one.tokens_BT.shape == one.targets_BT.shape == (2, 8)
        assert one.tokens_BT.is_contiguous()
        assert one.targets_BT.is_contiguous()
        assert one.doc_ids_BT is None
        assert torch.equal(one.targets_BT, one.tokens_BT + 1)
        assert torch.equal(one.tokens_BT, batch.sequences_ABW[a, :, :-1].long())


def test_ids_above_two_and_four_bytes_survive(train_split):
    (small,) = read_steps(
        DirectLoader, train_split(np.full(100, 65_535), vocab_size=65_536, name="small"), 1
    )
    assert next(small.micro_batches()).targets_BT.unique().tolist() == [65_535]
    (large,) = read_steps(
        DirectLoader, train_split(np.full(100, 200_000), vocab_size=200_001, name="large"), 1
    )
    assert large.sequences_ABW.dtype == torch.int32
    assert next(large.micro_batches()).targets_BT.unique().tolist() == [200_000]


@pytest.mark.parametrize("loader_class", LOADERS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_ranks_reads_the_same_sequences_per_step(
    train_split, loader_class, world_size
):
    split = train_split(np.arange(8 * 50 + 1), vocab_size=500)
    rows, accumulate, steps = 2, 8 // world_size, 7
    ranks = [
        read_steps(
            loader_class,
            split,
            steps,
            dp_size=world_size,
            dp_rank=rank,
            rows_per_device=rows,
            accumulate=accumulate,
        )
        for rank in range(world_size)
    ]
    order = shuffled(np.arange(steps * 16), 50, seed=7)
    for step in range(steps):
        assert {batches[step].position for batches in ranks} == {16 * (step + 1)}
        seen = []
        for rank, batches in enumerate(ranks):
            for a in range(accumulate):
                for b in range(rows):
                    index = step * 16 + (a * world_size + rank) * rows + b
                    assert int(batches[step].sequences_ABW[a, b, 0]) == order[index] * 8
                    seen.append(index)
        assert sorted(seen) == list(range(step * 16, step * 16 + 16))


@pytest.mark.parametrize("loader_class", LOADERS)
def test_seeking_while_reading_ahead(train_split, loader_class):
    split = train_split(RNG.integers(0, 300, 801))
    whole = read_steps(loader_class, split, 6)
    with closing(loader_class(SequenceSteps(split, plan(), ShardReader()))) as loader:
        for step in (5, 0, 3, 3, 1):
            loader.seek(step * 6)
            assert loader.position == step * 6
            assert torch.equal(next(loader).sequences_ABW, whole[step].sequences_ABW)
            assert loader.position == step * 6 + 6


@pytest.mark.parametrize("loader_class", LOADERS)
def test_delivered_batches_are_not_overwritten(train_split, loader_class):
    tokens = RNG.integers(0, 300, 801)
    split = train_split(tokens, ends=[100, 801], mask=RNG.integers(0, 2, 801))
    with closing(
        loader_class(SequenceSteps(split, plan(document_mask=True), ShardReader()))
    ) as loader:
        held = [next(loader) for _ in range(9)]
        copies = [
            (b.sequences_ABW.clone(), b.mask_ABT.clone(), b.doc_ids_ABT.clone()) for b in held
        ]
        for _ in range(9):
            next(loader)
    for batch, copy in zip(held, copies, strict=True):
        assert all(
            torch.equal(mine, kept)
            for mine, kept in zip(
                (batch.sequences_ABW, batch.mask_ABT, batch.doc_ids_ABT), copy, strict=True
            )
        )
    order = shuffled(np.arange(6), 100, seed=7)
    assert held[0].sequences_ABW.reshape(6, 9).tolist() == [
        tokens[w * 8 : w * 8 + 9].tolist() for w in order
    ]


@pytest.mark.parametrize("loader_class", LOADERS)
def test_masks_and_documents(train_split, loader_class):
    tokens, mask = RNG.integers(0, 300, 81), RNG.integers(0, 2, 81)
    ends = np.array([3, 20, 41, 42, 81])
    split = train_split(tokens, ends=ends, mask=mask)
    (batch,) = read_steps(loader_class, split, 1, document_mask=True, accumulate=5)
    documents = np.searchsorted(ends, np.arange(81), side="right")
    order = shuffled(np.arange(10), 10, seed=7).reshape(5, 2)
    for a, micro in enumerate(batch.micro_batches()):
        for b, index in enumerate(order[a]):
            inputs, targets = np.arange(8) + index * 8, np.arange(8) + index * 8 + 1
            assert micro.tokens_BT[b].tolist() == tokens[inputs].tolist()
            assert (
                micro.targets_BT[b].tolist()
                == np.where(mask[targets] != 0, tokens[targets], -1).tolist()
            )
            assert (
                micro.doc_ids_BT[b].tolist() == (documents[inputs] - documents[inputs[0]]).tolist()
            )
    assert micro.doc_ids_BT.dtype == torch.int32


@pytest.mark.parametrize("loader_class", LOADERS)
def test_a_corpus_smaller_than_a_step_trains_over_epochs(train_split, loader_class):
    split = train_split(np.arange(8 * 4 + 1))
    batches = read_steps(loader_class, split, 2)  # 6 sequences per step, 4 per epoch
    first = torch.cat([b.sequences_ABW[..., 0].flatten() for b in batches]).tolist()
    assert [sorted(first[at : at + 4]) for at in (0, 4, 8)] == [[0, 8, 16, 24]] * 3


class Failing(ShardReader):
    def __init__(self, good):
        self.good = good

    def read(self, split, indices, seq_len, out):
        self.good -= 1
        if self.good < 0:
            raise DataError("The disk is gone.", fix="Put it back.")
        super().read(split, indices, seq_len, out)


def test_an_error_in_the_thread_is_raised_at_its_step(train_split):
    reader = Failing(good=3)
    with closing(
        PrefetchLoader(SequenceSteps(train_split(np.arange(300)), plan(), reader))
    ) as loader:
        for _ in range(3):
            next(loader)
        for _ in range(2):
            with pytest.raises(DataError, match="The disk is gone"):
                next(loader)
            assert loader_threads() == []
            assert loader.position == 18
        reader.good = 100
        assert next(loader).position == 24


class Gate(ShardReader):
    """Counts the thread's reads and can delay them."""

    def __init__(self):
        self.reads = 0
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)

    def read(self, split, indices, seq_len, out):
        self.reads += 1
        self.entered.release()
        self.open.wait(10)
        super().read(split, indices, seq_len, out)


def test_prefetch_reads_in_one_thread_and_no_further_than_requested(train_split):
    gate = Gate()
    gate.open.set()
    steps = SequenceSteps(train_split(np.arange(300)), plan(prefetch=3), gate)
    with closing(PrefetchLoader(steps)) as loader:
        assert loader_threads() == []  # nothing happens before the first step is requested
        next(loader)
        for _ in range(4):  # the one delivered, and three more
            assert gate.entered.acquire(timeout=10)
        assert len(loader_threads()) == 1
        assert not gate.entered.acquire(timeout=0.05)
        assert gate.reads == 4


def test_the_wait_is_measured(train_split):
    gate = Gate()
    with closing(
        PrefetchLoader(SequenceSteps(train_split(np.arange(300)), plan(), gate))
    ) as loader:
        timer = threading.Timer(0.05, gate.open.set)
        timer.start()
        assert next(loader).wait_ms > 20
        timer.join()


def test_closing_ends_the_thread_and_reading_can_continue(train_split):
    split = train_split(np.arange(300))
    loader = PrefetchLoader(SequenceSteps(split, plan(), ShardReader()))
    loader.close()
    next(loader)
    loader.close()
    loader.close()
    assert loader_threads() == []
    assert next(loader).position == 12
    loader.close()


@pytest.mark.slow
def test_a_loader_that_is_dropped_leaves_no_thread(train_split):
    loader = PrefetchLoader(SequenceSteps(train_split(np.arange(300)), plan(), ShardReader()))
    next(loader)
    assert len(loader_threads()) == 1
    del loader
    gc.collect()
    assert loader_threads() == []


@pytest.mark.slow
def test_a_program_that_never_closes_its_loader_ends(write_set):
    code = f"""
from flatout.data.load.loader import PrefetchLoader
from flatout.data.store.shards import Dataset
from flatout.data.load.batches import BatchPlan, ShardReader, SequenceSteps
plan = BatchPlan(
    seq_len=8, rows_per_device=2, accumulate=1, dp_rank=0, dp_size=1, seed=0,
    document_mask=False, prefetch=2, device="cpu",
)
split = Dataset.open({str(write_set(np.arange(300)))!r}).split("train")
loader = PrefetchLoader(SequenceSteps(split, plan, ShardReader()))
print(next(loader).position)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


@pytest.mark.gpu
@pytest.mark.gpu_essential
@pytest.mark.parametrize("loader_class", LOADERS)
def test_the_device_receives_what_the_host_reads(train_split, loader_class):
    split = train_split(
        RNG.integers(0, 65_536, 80_001),
        ends=np.arange(1, 80_002, 100),
        mask=RNG.integers(0, 2, 80_001),
        vocab_size=65_536,
    )
    wanted = read_steps(DirectLoader, split, 60, seq_len=64, document_mask=True)
    found = read_steps(loader_class, split, 60, seq_len=64, document_mask=True, device="cuda")
    for host, device in zip(wanted, found, strict=True):
        assert device.sequences_ABW.is_cuda
        assert device.sequences_ABW.dtype == torch.uint16
        for one, other in zip(host.micro_batches(), device.micro_batches(), strict=True):
            for name in ("tokens_BT", "targets_BT", "doc_ids_BT"):
                assert torch.equal(getattr(one, name), getattr(other, name).cpu())


@pytest.mark.parametrize("loader_class", LOADERS)
def test_a_loader_is_an_endless_iterator(train_split, loader_class):
    with closing(
        loader_class(SequenceSteps(train_split(np.arange(300)), plan(), ShardReader()))
    ) as loader:
        for _, batch in zip(range(20), loader, strict=False):
            assert batch.sequences_ABW.shape == (3, 2, 9)
