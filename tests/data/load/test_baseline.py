import numpy as np

from flatout.data.load import baseline
from flatout.data.load.baseline import TokenisingReader
from flatout.data.load.batches import ShardReader

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


def test_a_text_is_tokenised_for_each_sequence_and_decoded_once(
    train_split, stub_tokenizer, monkeypatch
):
    monkeypatch.setattr(baseline, "KEPT_TEXTS", 3)
    split = train_split(np.arange(1, 201))
    texts = [stub_tokenizer.decode(split.read_tokens(at, at + 9).tolist()) for at in (0, 8, 16)]
    reader = TokenisingReader(stub_tokenizer)
    read(reader, split, [3, 0])
    monkeypatch.delattr(type(stub_tokenizer), "decode")  # it is not decoded in later steps
    read(reader, split, [7, 7])
    assert stub_tokenizer.encoded == [*texts, texts[0]]


def test_end_of_text_is_not_spelled_out(train_split, stub_tokenizer):
    reader = TokenisingReader(stub_tokenizer)
    split = train_split([5, 6, 0, 7, 8])
    assert read(reader, split, [0], seq_len=4).tolist() == [[5, 6, 0, 7, 8]]
    assert stub_tokenizer.encoded == [stub_tokenizer.decode([5, 6, 7, 8])]
