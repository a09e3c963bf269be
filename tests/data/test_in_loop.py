import numpy as np
import pytest
import torch

from flatout.data import in_loop
from flatout.data.in_loop import TokenisingWindows
from flatout.data.loader import DirectFeed, FeedPlan, PrefetchFeed, ShardWindows

TOKENS = np.random.default_rng(0).integers(0, 300, 401)


def read(windows, split, indices, seq_len=8):
    out = np.empty((len(indices), seq_len + 1), split.dtype)
    windows.read(split, np.asarray(indices), out)
    return out


def test_the_windows_are_the_very_same(train_split, stub_tokenizer):
    split = train_split(TOKENS)
    indices = np.random.default_rng(1).permutation(50)
    assert np.array_equal(read(TokenisingWindows(stub_tokenizer), split, indices), read(ShardWindows(), split, indices))


@pytest.mark.parametrize("feed_class", [DirectFeed, PrefetchFeed])
def test_both_feeds_hand_out_the_same_steps(train_split, stub_tokenizer, feed_class):
    split = train_split(TOKENS)
    plan = FeedPlan(seq_len=8, rows_per_device=2, accumulate=2, rank=0, world_size=1, seed=3, document_mask=False, prefetch=2, device="cpu")
    with feed_class(split, plan, TokenisingWindows(stub_tokenizer)) as slow, feed_class(split, plan, ShardWindows()) as fast:
        for _ in range(15):
            assert torch.equal(next(slow).windows_ABW, next(fast).windows_ABW)


def test_it_tokenises_the_text_of_each_window_in_every_call(train_split, stub_tokenizer):
    split = train_split(np.arange(1, 201))
    windows = TokenisingWindows(stub_tokenizer)
    for call in (1, 2):
        read(windows, split, [3, 0])
        assert len(stub_tokenizer.encoded) == 2 * call
        assert windows.tokens_encoded == 2 * 9 * call
    assert stub_tokenizer.encoded[0] == stub_tokenizer.decode(split.read_tokens(24, 33).tolist())


def test_a_primed_text_is_not_decoded_again(train_split, stub_tokenizer, monkeypatch):
    split = train_split(TOKENS)
    windows = TokenisingWindows(stub_tokenizer)
    windows.prime(split, np.array([1, 5]), 8)
    assert stub_tokenizer.encoded == []
    monkeypatch.setattr(stub_tokenizer, "decode", lambda ids: pytest.fail("decoded inside the step"))
    read(windows, split, [5, 1, 5])
    assert len(stub_tokenizer.encoded) == 3


def test_end_of_text_is_not_spelled_out(train_split, stub_tokenizer):
    windows = TokenisingWindows(stub_tokenizer)
    split = train_split([5, 6, 0, 7, 8])
    assert read(windows, split, [0], seq_len=4).tolist() == [[5, 6, 0, 7, 8]]
    assert stub_tokenizer.encoded == [stub_tokenizer.decode([5, 6, 7, 8])]


def test_the_kept_texts_are_bounded(train_split, stub_tokenizer, monkeypatch):
    monkeypatch.setattr(in_loop, "KEPT_TEXTS", 3)
    windows = TokenisingWindows(stub_tokenizer)
    split = train_split(TOKENS)
    for _ in range(2):
        read(windows, split, range(10))
    assert len(windows._texts) == 3
