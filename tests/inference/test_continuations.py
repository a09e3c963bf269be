"""Log-likelihoods: every token once, with all the context that fits, in any batch."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from flatout.errors import ConfigError
from flatout.inference.continuations import (
    Pair,
    Window,
    complete,
    encode_pair,
    score_pairs,
    score_texts,
    windows,
)
from flatout.inference.generate import sample
from flatout.inference.load import load_run

WORDS = SimpleNamespace(eot_id=0, encode=lambda text: [len(word) for word in text.split(" ")[1:]])
"""A tokenizer whose tokens start with a space, as those of most vocabularies do."""


def test_each_token_is_a_target_once_and_the_last_window_is_full():
    found = list(windows(Pair([99], list(range(10))), 4))
    assert found == [
        Window([99, 0, 1, 2, 3], 4),
        Window([3, 4, 5, 6, 7], 4),
        Window([5, 6, 7, 8, 9], 2),
    ]


def test_a_long_context_loses_its_start():
    assert list(windows(Pair([1, 2, 3, 4, 5], [6, 7]), 4)) == [Window([3, 4, 5, 6, 7], 2)]
    assert list(windows(Pair([1, 2], [3]), 4)) == [Window([1, 2, 3], 1)]
    assert list(windows(Pair([1, 2], []), 4)) == []


def test_white_space_at_the_end_of_a_context_belongs_to_the_continuation():
    assert encode_pair(WORDS, " one three", " four") == Pair([3, 5], [4])
    assert encode_pair(WORDS, " one three ", "four") == Pair([3, 5], [4])


def test_an_empty_context_is_the_start_of_a_document():
    assert encode_pair(WORDS, "", " four") == Pair([0], [4])


@pytest.fixture(scope="module")
def loaded(fox_run):
    """A tiny model of characters with a context of 32 tokens."""
    return load_run(fox_run[0] / "runs" / "fox", "last", device="cpu")


@torch.no_grad()
def reference(loaded, pair):
    """Return the score of a pair, token by token, each with the context that its window has."""
    total, greedy = 0.0, True
    for tokens, num_scored in windows(pair, loaded.config.data.seq_len):
        logits_TV = loaded.model.logits(torch.tensor([tokens[:-1]]))[0]
        for position in range(len(tokens) - 1 - num_scored, len(tokens) - 1):
            target = tokens[position + 1]
            total += float(logits_TV[position].log_softmax(-1)[target])
            greedy &= int(logits_TV[position, : loaded.tokenizer.vocab_size].argmax()) == target
    return total, greedy


@pytest.mark.slow
def test_scores_equal_those_of_one_text_at_a_time(loaded):
    draw, letters = random.Random(1), range(loaded.tokenizer.vocab_size)
    pairs = [
        Pair(
            draw.choices(letters, k=draw.randint(1, 50)),
            draw.choices(letters, k=draw.randint(1, 80)),
        )
        for _ in range(25)
    ]
    best = int(loaded.model.logits(torch.tensor([[1, 2]]))[0, -1].argmax())
    pairs.append(Pair([1, 2], [best]))
    found = score_pairs(loaded, pairs)
    for score, pair in zip(found, pairs, strict=True):
        total, greedy = reference(loaded, pair)
        assert score.log_likelihood == pytest.approx(total, rel=1e-5)
        assert score.is_greedy == greedy
    assert found[-1].is_greedy
    assert not all(score.is_greedy for score in found)


@pytest.mark.slow
def test_a_text_has_the_loss_that_training_computes(loaded):
    text = "quick brown dog"
    ids = loaded.tokenizer.encode(text)
    inputs, targets = [loaded.tokenizer.eot_id, *ids[:-1]], ids
    assert len(inputs) <= loaded.config.data.seq_len
    with torch.no_grad():
        loss, _ = loaded.model(torch.tensor([inputs]), torch.tensor([targets]))
    assert score_texts(loaded, [text]) == [pytest.approx(-float(loss), rel=1e-5)]


@pytest.mark.slow
def test_an_empty_continuation_is_certain(loaded):
    assert score_pairs(loaded, [Pair([1], [])]) == [(0.0, True)]


@pytest.mark.slow
def test_completions_are_greedy_and_end_before_a_stop_text(loaded):
    whole = complete(loaded, "the fox", {"max_gen_toks": 12})
    model, tokenizer = loaded.model, loaded.tokenizer
    same = sample(model, tokenizer, "the fox", temperature=0, max_tokens=12, max_context=32)
    assert whole == "".join(same)
    assert whole
    stop = whole[2:4]
    cut = complete(loaded, "the fox", {"max_gen_toks": 12, "until": [stop, ""]})
    assert cut == whole[: whole.index(stop)]
    assert complete(loaded, "the fox", {"max_gen_toks": 12, "until": stop}) == cut
    warm = {"max_gen_toks": 12, "do_sample": True, "temperature": 0.0}
    assert complete(loaded, "the fox", warm) == whole


@pytest.mark.slow
def test_settings_of_a_task_are_checked(loaded):
    with pytest.raises(ConfigError, match="no number of tokens"):
        complete(loaded, "the", {"max_gen_toks": "many"})
