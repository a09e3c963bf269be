"""Sampling: limits, prompts, seeds, probabilities, and caches that do not change tokens."""

import math
from functools import partial
from itertools import islice

import pytest
import torch
from scripted import EOT, Script, wordpiece
from torch import nn

from flatout.data.tokenizers.make import of_bytes
from flatout.inference.generate import Context, Sampling, draw_token, sample, tokens_after
from flatout.models.language_model import Decoder, LanguageModel
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention, cross_entropy

pytestmark = pytest.mark.slow


def generated(text, prompt="", **sampling):
    model = Script(text.encode())
    return "".join(sample(model, of_bytes(), prompt, Sampling(**sampling)))


def greedy(logits_V):
    return int(logits_V.argmax())


def test_a_sample_ends_at_the_end_of_the_document():
    assert generated("hello", max_tokens=100) == "hello"
    assert generated("hello", max_tokens=2**70) == "hello"


def test_a_sample_ends_after_max_tokens():
    assert generated("hello", max_tokens=2) == "he"


def test_rows_of_a_padded_vocabulary_are_never_drawn():
    assert generated("x" * 50, temperature=2.0) == "x" * 50


@pytest.mark.parametrize("limit", [{"top_k": 7}, {"top_p": 0.9}, {}])
def test_a_tokenizer_with_more_tokens_than_the_model_draws_what_there_is(limit):
    draw = partial(draw_token, sampling=Sampling(**limit), generator=torch.Generator())
    assert {draw(torch.zeros(4), vocab_size=9) for _ in range(200)} == {0, 1, 2, 3}


def test_an_empty_prompt_starts_a_document():
    model = Script(b"ab")
    list(sample(model, of_bytes(), ""))
    assert model.seen == [[EOT], [EOT, *b"a"], [EOT, *b"ab"]]


def test_a_prompt_without_tokens_starts_a_document():
    tokenizer = wordpiece()
    model = Script(tokenizer.encode("the cat"), eot=tokenizer.eot_id, past=tokenizer.vocab_size)
    assert tokenizer.encode(" ") == []
    assert "".join(sample(model, tokenizer, " ")) == "the cat"
    assert model.seen[0] == [tokenizer.eot_id]


def test_a_full_context_restarts_from_its_second_half():
    model = Script(b"0123456789abcdef")
    list(sample(model, of_bytes(), ""))
    assert model.seen[7] == [EOT, *b"0123456"]
    contexts = (b"4567", b"45678", b"456789", b"456789a", b"456789ab", b"9abc")
    assert model.seen[8:14] == [list(context) for context in contexts]


@pytest.mark.parametrize(
    ("max_context", "seen"),
    [(4, [b"ompt", b"ta", b"tab"]), (1, [b"t", b"a", b"b"]), (4000, [b"g prompt"])],
)
def test_a_prompt_longer_than_the_context_loses_its_beginning(max_context, seen):
    model = Script(b"ab")
    list(sample(model, of_bytes(), "a long prompt", max_context=max_context))
    assert model.seen[: len(seen)] == [list(context) for context in seen]


class Tally(Decoder):
    """A recurrent model's decoder: its state is one number, and its context has no limit."""

    def __init__(self, reads):
        super().__init__(None)
        self.total, self.reads = 0, reads

    def scores_after(self, tokens_BT):
        self.reads.append(tokens_BT.shape[1])
        self.total += int(tokens_BT.sum())
        return nn.functional.one_hot(torch.tensor([self.total % 10]), 10).float()


def test_a_model_without_a_limit_reads_each_token_once():
    model, reads = Script(b""), []
    model.decoder = lambda max_tokens: Tally(reads)
    found = list(islice(tokens_after(Context(model, 2), [1, 2, 4], greedy), 40))
    assert found[:5] == [7, 4, 8, 6, 2]
    assert reads == [3] + [1] * 39


def noisy_sample(seed, **options):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    model = Script(b"a" * 40, noise=0.3, vocab_size=257)
    sampling = Sampling(temperature=1.5, max_tokens=30, seed=seed, **options)
    text = "".join(sample(model, of_bytes(), "", sampling))
    assert torch.equal(torch.random.get_rng_state(), before), "the run's generator is not used"
    return text


def test_equal_seeds_give_equal_text_and_different_seeds_do_not():
    assert noisy_sample(1) == noisy_sample(1)
    assert noisy_sample(1) != noisy_sample(2)


def test_top_k_and_top_p_narrow_the_choice():
    assert noisy_sample(1, top_k=1) == "a" * 30
    assert noisy_sample(1, top_p=1e-6) == "a" * 30
    assert noisy_sample(1, top_p=1.0) == noisy_sample(1)


def draws(probabilities, number, *, vocab_size, temperature=1.0, **options):
    draw = partial(
        draw_token,
        torch.log(torch.tensor(probabilities)),
        Sampling(temperature, **options),
        vocab_size=vocab_size,
        generator=torch.Generator().manual_seed(0),
    )
    return [draw() for _ in range(number)]


@pytest.mark.parametrize(("limit", "kept"), [({"top_p": 0.7}, {0, 1}), ({"top_k": 3}, {0, 1, 2})])
def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_top_k_keeps_k(limit, kept):
    assert set(draws([0.5, 0.3, 0.15, 0.05], 300, vocab_size=4, **limit)) == kept


@pytest.mark.parametrize(
    ("temperature", "top_k", "expected"),
    [(1.0, None, [6, 3, 1]), (0.5, None, [36, 9, 1]), (1.0, 2, [6, 3, 0])],
    ids=str,
)
def test_draws_follow_the_probabilities(temperature, top_k, expected):
    found = draws([0.6, 0.3, 0.1], 3000, vocab_size=3, temperature=temperature, top_k=top_k)
    counts = torch.bincount(torch.tensor(found), minlength=3)
    assert (counts / 3000 - torch.tensor(expected) / sum(expected)).abs().max() < 0.04


@pytest.mark.parametrize("top_k", [None, 1, 2, 99])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-30, 1e-3])
def test_a_low_temperature_draws_the_most_likely_token(temperature, top_k):
    probabilities = [math.exp(logit) for logit in (1.0, 5.0, 4.0, 9.0)]
    assert draws(probabilities, 1, vocab_size=3, temperature=temperature, top_k=top_k) == [1]


def test_sampling_restores_training_mode():
    model = Script(b"ab")
    model.train()
    list(sample(model, of_bytes()))
    assert model.training


TRANSFORMERS = {
    "gpt2": {"positions": "learned", "bias": True},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2},
    "window, qk norm": {"window": 24, "qk_norm": True, "num_kv_heads": 1},
}


def transformer(own, seq_len):
    """Return a transformer in fp64, where rounding cannot change a draw."""
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "num_layers": 2, "d_model": 32, "num_heads": 4, "tied_head": False}
    ops = Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused)
    model = Transformer(Transformer.check(shape | own, seq_len=seq_len), ops).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


@pytest.mark.quick_cases(
    "within the context-0.0-None-None-window, qk norm",
    "within the context-0.8-40-None-gpt2",
    "within the context-1.2-None-0.9-llama",
    "past the context-0.0-None-None-window, qk norm",
    "past the context-0.8-40-None-gpt2",
    "past the context-1.2-None-0.9-llama",
)
@pytest.mark.parametrize("own", TRANSFORMERS.values(), ids=list(TRANSFORMERS))
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.0, None, None), (1.0, None, None), (0.8, 40, None), (1.2, None, 0.9)],
    ids=str,
)
@pytest.mark.parametrize(
    ("max_context", "num_tokens"),
    [(320, 300), (32, 150)],
    ids=["within the context", "past the context"],
)
def test_a_cache_does_not_change_any_token(own, temperature, top_k, top_p, max_context, num_tokens):
    model = transformer(own, max_context)

    def tokens():
        choose = partial(
            draw_token,
            sampling=Sampling(temperature, top_k, top_p),
            vocab_size=257,
            generator=torch.Generator().manual_seed(3),
        )
        found = tokens_after(Context(model, max_context), [7, 3, 5], choose)
        return list(islice(found, num_tokens))

    cached = tokens()
    model.decoder = lambda max_tokens: LanguageModel.decoder(model, max_tokens)
    assert cached == tokens()
    assert len(set(cached)) > (3 if temperature == 0 else 50), sorted(set(cached))
