import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from flatout.data.load.batches import BatchPlan, SequenceSteps, ShardReader
from flatout.data.load.feed import DirectFeed, PrefetchFeed, evaluation_batches
from flatout.data.store.manifest import BLOCK_BYTES
from flatout.data.store.order import shuffled
from flatout.data.store.shards import Dataset
from flatout.errors import DataError

RNG = np.random.default_rng(0)
FEEDS = [DirectFeed, PrefetchFeed]


def plan(**changes):
    values = {
        "seq_len": 8,
        "rows_per_device": 2,
        "accumulate": 3,
        "rank": 0,
        "world_size": 1,
        "seed": 7,
    }
    return BatchPlan(
        **{**values, "document_mask": False, "prefetch": 2, "device": "cpu", **changes}
    )


def read_steps(feed_class, split, steps, start=0, **changes):
    with feed_class(SequenceSteps(split, plan(**changes), ShardReader())) as feed:
        feed.seek(start)
        return [next(feed) for _ in range(steps)]


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name == "flatout-feed"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert feed_threads() == []


@pytest.mark.parametrize("feed_class", FEEDS)
def test_steps_follow_the_closed_form_order(train_split, feed_class):
    tokens = RNG.integers(0, 300, 801)
    split = train_split(tokens, shard_bytes=300)
    batches = read_steps(feed_class, split, 30)  # 180 windows of 100: two epochs
    order = shuffled(np.arange(180), 100, seed=7)
    wanted = np.stack([tokens[w * 8 : w * 8 + 9] for w in order]).reshape(30, 3, 2, 9)
    assert np.array_equal(torch.stack([b.sequences_ABW for b in batches]).numpy(), wanted)
    assert [b.position for b in batches] == list(range(6, 181, 6))
    assert all(b.wait_ms >= 0 for b in batches)
    assert all(b.mask_ABT is None and b.doc_ids_ABT is None for b in batches)


@pytest.mark.parametrize("feed_class", FEEDS)
def test_micro_batches_shift_once_and_are_contiguous_int64(train_split, feed_class):
    split = train_split(np.arange(300))
    (batch,) = read_steps(feed_class, split, 1)
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
        DirectFeed, train_split(np.full(100, 65_535), vocab_size=65_536, name="small"), 1
    )
    assert next(small.micro_batches()).targets_BT.unique().tolist() == [65_535]
    (large,) = read_steps(
        DirectFeed, train_split(np.full(100, 200_000), vocab_size=200_001, name="large"), 1
    )
    assert large.sequences_ABW.dtype == torch.int32
    assert next(large.micro_batches()).targets_BT.unique().tolist() == [200_000]


@pytest.mark.parametrize("feed_class", FEEDS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_ranks_reads_the_same_windows_a_step(train_split, feed_class, world_size):
    split = train_split(np.arange(8 * 50 + 1), vocab_size=500)
    rows, accumulate, steps = 2, 8 // world_size, 7
    ranks = [
        read_steps(
            feed_class,
            split,
            steps,
            world_size=world_size,
            rank=rank,
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
                    place = step * 16 + (a * world_size + rank) * rows + b
                    assert int(batches[step].sequences_ABW[a, b, 0]) == order[place] * 8
                    seen.append(place)
        assert sorted(seen) == list(range(step * 16, step * 16 + 16))


@pytest.mark.parametrize("feed_class", FEEDS)
def test_seeking_continues_exactly(train_split, feed_class):
    split = train_split(RNG.integers(0, 300, 801))
    whole = read_steps(feed_class, split, 12)
    rest = read_steps(feed_class, split, 7, start=whole[4].position)
    for one, other in zip(whole[5:], rest, strict=True):
        assert torch.equal(one.sequences_ABW, other.sequences_ABW)
        assert one.position == other.position


@pytest.mark.parametrize("feed_class", FEEDS)
def test_seeking_while_reading_ahead(train_split, feed_class):
    split = train_split(RNG.integers(0, 300, 801))
    whole = read_steps(feed_class, split, 6)
    with feed_class(SequenceSteps(split, plan(), ShardReader())) as feed:
        for step in (5, 0, 3, 3, 1):
            feed.seek(step * 6)
            assert feed.position == step * 6
            assert torch.equal(next(feed).sequences_ABW, whole[step].sequences_ABW)
            assert feed.position == step * 6 + 6


@pytest.mark.parametrize("feed_class", FEEDS)
def test_what_was_handed_out_stays(train_split, feed_class):
    tokens = RNG.integers(0, 300, 801)
    split = train_split(tokens, ends=[100, 801], mask=RNG.integers(0, 2, 801))
    with feed_class(SequenceSteps(split, plan(document_mask=True), ShardReader())) as feed:
        held = [next(feed) for _ in range(9)]
        copies = [
            (b.sequences_ABW.clone(), b.mask_ABT.clone(), b.doc_ids_ABT.clone()) for b in held
        ]
        for _ in range(9):
            next(feed)
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


@pytest.mark.parametrize("feed_class", FEEDS)
def test_masks_and_documents(train_split, feed_class):
    tokens, mask = RNG.integers(0, 300, 81), RNG.integers(0, 2, 81)
    ends = np.array([3, 20, 41, 42, 81])
    split = train_split(tokens, ends=ends, mask=mask)
    (batch,) = read_steps(feed_class, split, 1, document_mask=True, accumulate=5)
    documents = np.searchsorted(ends, np.arange(81), side="right")
    order = shuffled(np.arange(10), 10, seed=7).reshape(5, 2)
    for a, micro in enumerate(batch.micro_batches()):
        for b, window in enumerate(order[a]):
            inputs, targets = np.arange(8) + window * 8, np.arange(8) + window * 8 + 1
            assert micro.tokens_BT[b].tolist() == tokens[inputs].tolist()
            assert (
                micro.targets_BT[b].tolist()
                == np.where(mask[targets] != 0, tokens[targets], -1).tolist()
            )
            assert (
                micro.doc_ids_BT[b].tolist() == (documents[inputs] - documents[inputs[0]]).tolist()
            )
    assert micro.doc_ids_BT.dtype == torch.int32


@pytest.mark.parametrize("feed_class", FEEDS)
def test_a_micro_batch_with_more_documents_than_attention_takes_is_refused_on_the_host(
    train_split, feed_class
):
    ends = np.concatenate(
        [np.arange(16, 1121, 16), np.arange(1121, 1201)]
    )  # long documents, then some of one token
    split = train_split(np.arange(1200) % 300, ends=ends)
    asked = []

    def five(rows, seq_len):
        asked.append((rows, seq_len))
        return 5

    with feed_class(
        SequenceSteps(
            split, plan(document_mask=True, most_documents=five, accumulate=1), ShardReader()
        )
    ) as feed:
        accepted = []
        with pytest.raises(
            DataError,
            match=r"A micro-batch of 2 x 8 tokens has \d+ documents, .* takes 5\. Fix: .*flex-attention",
        ):
            accepted.extend(feed)
    assert set(asked) == {(2, 8)}
    counts = [len(row.unique()) for batch in accepted for row in batch.doc_ids_ABT[0]]
    assert counts
    assert all(one + other <= 5 for one, other in zip(counts[::2], counts[1::2], strict=True))
    with feed_class(
        SequenceSteps(split, plan(document_mask=True, accumulate=1), ShardReader())
    ) as feed:
        assert any(len(next(feed).doc_ids_ABT.flatten().unique()) == 8 for _ in range(75)), (
            "without a limit they are read"
        )


@pytest.mark.parametrize("feed_class", FEEDS)
def test_a_corpus_smaller_than_a_step_trains_over_epochs(train_split, feed_class):
    split = train_split(np.arange(8 * 4 + 1))
    batches = read_steps(feed_class, split, 2)  # 6 windows a step, 4 an epoch
    first = torch.cat([b.sequences_ABW[..., 0].flatten() for b in batches]).tolist()
    assert [sorted(first[at : at + 4]) for at in (0, 4, 8)] == [[0, 8, 16, 24]] * 3


@pytest.mark.parametrize("feed_class", FEEDS)
def test_a_corpus_shorter_than_one_window(train_split, feed_class):
    with pytest.raises(
        DataError,
        match=r"train split holds 8 tokens; one window of data.seq_len=8 needs 9.*data.seq_len=7",
    ):
        feed_class(SequenceSteps(train_split(np.arange(8)), plan(), ShardReader()))
    feed_class(SequenceSteps(train_split(np.arange(9), name="enough"), plan(), ShardReader()))


@pytest.mark.parametrize("feed_class", FEEDS)
def test_an_empty_split(train_split, feed_class):
    with pytest.raises(DataError, match="the train split is empty"):
        feed_class(SequenceSteps(train_split([], ends=[]), plan(), ShardReader()))


class Failing(ShardReader):
    def __init__(self, good):
        self.good = good

    def read(self, split, indices, out):
        self.good -= 1
        if self.good < 0:
            raise DataError("The disk is gone.", fix="Put it back.")
        super().read(split, indices, out)


def test_an_error_in_the_thread_is_raised_at_its_step(train_split):
    windows = Failing(good=3)
    with PrefetchFeed(SequenceSteps(train_split(np.arange(300)), plan(), windows)) as feed:
        for _ in range(3):
            next(feed)
        for _ in range(2):
            with pytest.raises(DataError, match="The disk is gone"):
                next(feed)
            assert feed_threads() == []
            assert feed.position == 18
        windows.good = 100
        assert next(feed).position == 24


@pytest.mark.parametrize("feed_class", FEEDS)
def test_a_block_that_goes_bad_in_the_middle_of_a_run_is_named_at_its_step(write_set, feed_class):
    per_block = BLOCK_BYTES // 2
    folder = write_set(np.zeros(6 * per_block, int), shard_bytes=3 * BLOCK_BYTES)
    split = Dataset.open(folder).split("train")
    windows = shuffled(np.arange(200), split.num_sequences(8191), seed=7) * 8191
    blocks = np.stack([windows // per_block, (windows + 8191) // per_block])
    bad = int(next(block for block in range(6) if block not in blocks[:, :4]))
    with (folder / f"train-0000{bad // 3}.bin").open("r+b") as shard:
        shard.seek(bad % 3 * BLOCK_BYTES + 9)
        shard.write(b"\1")
    good = int(np.flatnonzero((blocks == bad).any(axis=0))[0])
    with feed_class(
        SequenceSteps(split, plan(seq_len=8191, rows_per_device=1, accumulate=1), ShardReader())
    ) as feed:
        for _ in range(good):
            next(feed)
        with pytest.raises(
            DataError,
            match=rf"train-0000{bad // 3}\.bin, byte {bad % 3 * BLOCK_BYTES}: the block of .* fails its checksum",
        ):
            next(feed)
        assert feed.position == good >= 4


class Gate(ShardReader):
    """Lets a test count, and hold back, the thread's reads."""

    def __init__(self):
        self.reads = 0
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)

    def read(self, split, indices, out):
        self.reads += 1
        self.entered.release()
        self.open.wait(10)
        super().read(split, indices, out)


def test_reads_ahead_in_one_thread_and_no_further_than_asked(train_split):
    gate = Gate()
    gate.open.set()
    with PrefetchFeed(SequenceSteps(train_split(np.arange(300)), plan(prefetch=3), gate)) as feed:
        assert feed_threads() == []  # nothing happens before the first step is asked for
        next(feed)
        for _ in range(4):  # the one handed out, and three more
            assert gate.entered.acquire(timeout=10)
        assert len(feed_threads()) == 1
        assert not gate.entered.acquire(timeout=0.05)
        assert gate.reads == 4


def test_waiting_is_measured(train_split):
    gate = Gate()
    with PrefetchFeed(SequenceSteps(train_split(np.arange(300)), plan(), gate)) as feed:
        timer = threading.Timer(0.05, gate.open.set)
        timer.start()
        assert next(feed).wait_ms > 20
        timer.join()


def test_closing_ends_the_thread_and_reading_goes_on_after(train_split):
    split = train_split(np.arange(300))
    feed = PrefetchFeed(SequenceSteps(split, plan(), ShardReader()))
    feed.close()
    next(feed)
    feed.close()
    feed.close()
    assert feed_threads() == []
    assert next(feed).position == 12
    feed.close()


def test_a_feed_that_is_dropped_leaves_no_thread(train_split):
    feed = PrefetchFeed(SequenceSteps(train_split(np.arange(300)), plan(), ShardReader()))
    next(feed)
    assert len(feed_threads()) == 1
    del feed
    gc.collect()
    assert feed_threads() == []


def test_a_program_that_never_closes_its_feed_ends(write_set):
    code = f"""
from flatout.data.load.feed import PrefetchFeed
from flatout.data.store.shards import Dataset
from flatout.data.load.batches import BatchPlan, ShardReader, SequenceSteps
plan = BatchPlan(seq_len=8, rows_per_device=2, accumulate=1, rank=0, world_size=1, seed=0, document_mask=False, prefetch=2, device="cpu")
feed = PrefetchFeed(SequenceSteps(Dataset.open({str(write_set(np.arange(300)))!r}).split("train"), plan, ShardReader()))
print(next(feed).position)
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
@pytest.mark.parametrize("feed_class", FEEDS)
def test_the_device_gets_what_the_host_reads(train_split, feed_class):
    split = train_split(
        RNG.integers(0, 65_536, 80_001),
        ends=np.arange(1, 80_002, 100),
        mask=RNG.integers(0, 2, 80_001),
        vocab_size=65_536,
    )
    wanted = read_steps(DirectFeed, split, 60, seq_len=64, document_mask=True)
    found = read_steps(feed_class, split, 60, seq_len=64, document_mask=True, device="cuda")
    for host, device in zip(wanted, found, strict=True):
        assert device.sequences_ABW.is_cuda
        assert device.sequences_ABW.dtype == torch.uint16
        for one, other in zip(host.micro_batches(), device.micro_batches(), strict=True):
            for name in ("tokens_BT", "targets_BT", "doc_ids_BT"):
                assert torch.equal(getattr(one, name), getattr(other, name).cpu())


@pytest.mark.parametrize("feed_class", FEEDS)
def test_a_feed_is_an_endless_iterator(train_split, feed_class):
    with feed_class(SequenceSteps(train_split(np.arange(300)), plan(), ShardReader())) as feed:
        for _, batch in zip(range(20), feed, strict=False):
            assert batch.sequences_ABW.shape == (3, 2, 9)


def evaluated(split, world_size=1, **kwargs):
    """All ranks' batches, each list as long as the others."""
    values = {"seq_len": 8, "rows": 3, "device": "cpu", "windows": ShardReader(), **kwargs}
    ranks = [
        list(evaluation_batches(split, rank=rank, world_size=world_size, **values))
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
def test_evaluation_of_the_beginning(train_split, max_tokens):
    tokens = RNG.integers(0, 300, 100)
    for world_size in (1, 2):
        batches = evaluated(
            train_split(tokens, name=f"set{world_size}"), world_size, max_tokens=max_tokens
        )
        targets = torch.cat([micro.targets_BT[micro.targets_BT >= 0] for micro in batches])
        assert targets.tolist() == tokens[1 : max_tokens + 1].tolist()


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_evaluation_of_nothing(train_split, num_tokens):
    assert evaluated(train_split(np.zeros(num_tokens, int), ends=[1] * num_tokens)) == []


def test_evaluation_refuses_more_documents_than_attention_takes(train_split):
    split = train_split(np.arange(100), ends=np.arange(1, 101))
    limits = {"document_mask": True, "most_documents": lambda rows, seq_len: rows * seq_len}
    assert len(evaluated(split, **limits)) == 5
    with pytest.raises(DataError, match=r"3 x 8 tokens has 24 documents, .* takes 23"):
        evaluated(split, **limits | {"most_documents": lambda rows, seq_len: rows * seq_len - 1})


def test_evaluation_obeys_the_mask_and_the_documents(train_split):
    tokens, mask = RNG.integers(0, 300, 60), RNG.integers(0, 2, 60)
    ends = np.array([5, 30, 44, 60])
    batches = evaluated(train_split(tokens, ends=ends, mask=mask), document_mask=True)
    targets = torch.cat([micro.targets_BT.flatten() for micro in batches])[:59]
    assert targets.tolist() == np.where(mask[1:] != 0, tokens[1:], -1).tolist()
    documents = np.searchsorted(ends, np.arange(60), side="right")
    doc_ids = torch.cat([micro.doc_ids_BT for micro in batches])[:7]
    for window in range(7):
        assert (
            doc_ids[window].tolist()
            == (documents[window * 8 : window * 8 + 8] - documents[window * 8]).tolist()
        )
