import numpy as np
import pytest
from plans import batch_plan

from flatout.data.load import baseline
from flatout.data.load.baseline import TokenisingReader
from flatout.data.load.batches import SequenceSteps, ShardReader
from flatout.data.load.loader import DirectLoader, PrefetchLoader
from flatout.data.store.shards import Dataset

TOKENS = np.random.default_rng(0).integers(0, 300, 401)


def read(reader, split, indices, seq_len=8):
    out = np.empty((len(indices), seq_len + 1), split.dtype)
    reader.read(split, np.asarray(indices), seq_len, out)
    return out


def test_the_sequences_are_the_same(train_split, stub_tokenizer):
    split = train_split(TOKENS)
    indices = np.random.default_rng(1).permutation(50)
    assert np.array_equal(
        read(TokenisingReader(stub_tokenizer), split, indices), read(ShardReader(), split, indices)
    )


def test_the_text_of_each_sequence_is_tokenised_in_every_call(train_split, stub_tokenizer):
    split = train_split(np.arange(1, 201))
    reader = TokenisingReader(stub_tokenizer)
    for call in (1, 2):
        read(reader, split, [3, 0])
        assert len(stub_tokenizer.encoded) == 2 * call
        assert reader.tokens_encoded == 2 * 9 * call
    assert stub_tokenizer.encoded[0] == stub_tokenizer.decode(split.read_tokens(24, 33).tolist())


def test_a_primed_text_is_not_decoded_again(train_split, stub_tokenizer, monkeypatch):
    split = train_split(TOKENS)
    reader = TokenisingReader(stub_tokenizer)
    reader.prime(split, np.array([1, 5]), 8)
    assert stub_tokenizer.encoded == []
    monkeypatch.setattr(
        stub_tokenizer, "decode", lambda ids: pytest.fail("decoded inside the step")
    )
    read(reader, split, [5, 1, 5])
    assert len(stub_tokenizer.encoded) == 3


class CountingReader(TokenisingReader):
    """Counts the decoded sequences."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.decoded = 0
        original = tokenizer.decode

        def decode(ids):
            self.decoded += 1
            return original(ids)

        tokenizer.decode = decode


@pytest.mark.parametrize("loader_class", [DirectLoader, PrefetchLoader])
@pytest.mark.parametrize(
    ("start", "rank", "world_size"),
    [(0, 0, 1), (44, 0, 1), (36, 1, 2)],
    ids=["new", "resumed", "second of two"],
)
def test_a_primed_loader_decodes_nothing_inside_its_steps(
    train_split, stub_tokenizer, loader_class, start, rank, world_size
):
    """Also across the end of an epoch: each rank reads 5 steps of 4 of the 50 sequences."""
    reader = CountingReader(stub_tokenizer)
    with loader_class(
        SequenceSteps(train_split(TOKENS), batch_plan(dp_rank=rank, dp_size=world_size), reader)
    ) as loader:
        loader.seek(start)
        loader.prime(5)
        ahead = reader.decoded
        assert 0 < ahead <= 20
        assert stub_tokenizer.encoded == []
        assert loader.position == start
        for _ in range(5 - 2 * (loader_class is PrefetchLoader)):
            next(loader)
        loader.close()
        assert reader.decoded == ahead


def test_priming_ends_when_every_sequence_is_cached_or_the_cache_is_full(
    train_split, stub_tokenizer, monkeypatch
):
    reader = CountingReader(stub_tokenizer)
    DirectLoader(SequenceSteps(train_split(TOKENS), batch_plan(), reader)).prime(10**9)
    assert reader.decoded == 50
    monkeypatch.setattr(baseline, "KEPT_TEXTS", 10)
    reader = CountingReader(stub_tokenizer)
    loader = DirectLoader(SequenceSteps(train_split(TOKENS, name="other"), batch_plan(), reader))
    loader.prime(10**9)
    assert reader.decoded == 10
    next(loader)
    next(loader)
    assert reader.decoded == 10, "the first steps are the primed ones"
    next(loader)
    assert reader.decoded == 12, "two of its four sequences were primed"


def test_scoring_the_validation_text_drops_no_training_text(write_set, stub_tokenizer, monkeypatch):
    monkeypatch.setattr(baseline, "KEPT_TEXTS", 12)
    dataset = Dataset.open(write_set(TOKENS, val=TOKENS[:200]))
    reader = CountingReader(stub_tokenizer)
    loader = DirectLoader(SequenceSteps(dataset.split("train"), batch_plan(), reader))
    loader.prime(3)
    read(reader, dataset.split("val"), range(20))
    before = reader.decoded
    for _ in range(3):
        next(loader)
    assert reader.decoded == before


@pytest.mark.parametrize("loader_class", [DirectLoader, PrefetchLoader])
def test_a_shard_reader_needs_no_priming(train_split, loader_class, monkeypatch):
    split = train_split(TOKENS)
    with (
        loader_class(SequenceSteps(split, batch_plan(), ShardReader())) as loader,
        monkeypatch.context() as patched,
    ):
        patched.setattr(type(split), "read_tokens", lambda *args: pytest.fail("read"))
        patched.setattr(type(split), "read_sequences", lambda *args: pytest.fail("read"))
        loader.prime(10**9)
        assert loader.position == 0


def test_end_of_text_is_not_spelled_out(train_split, stub_tokenizer):
    reader = TokenisingReader(stub_tokenizer)
    split = train_split([5, 6, 0, 7, 8])
    assert read(reader, split, [0], seq_len=4).tolist() == [[5, 6, 0, 7, 8]]
    assert stub_tokenizer.encoded == [stub_tokenizer.decode([5, 6, 7, 8])]


def test_the_cached_texts_are_bounded(train_split, stub_tokenizer, monkeypatch):
    monkeypatch.setattr(baseline, "KEPT_TEXTS", 3)
    reader = TokenisingReader(stub_tokenizer)
    split = train_split(TOKENS)
    for _ in range(2):
        read(reader, split, range(10))
    assert [len(texts) for texts in reader._texts.values()] == [3]
