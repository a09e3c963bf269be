"""A model that sees the tokens which it learns to predict is found by trying it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from flatout.measure.attach.causality import are_own, looks_ahead, mixes_rows, predicted
from flatout.measure.attach.follower import Follower

TOKENS = torch.randint(1, 50, (4, 17), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A language model of one layer that mixes tokens in a way of its own."""

    def __init__(self, mix):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.conv, self.rnn = nn.Conv1d(16, 16, 3), nn.GRU(16, 16, batch_first=True)
        self.dropout, self.mix = nn.Dropout(0.5), mix

    def forward(self, tokens):
        return self.head(self.dropout(self.mix(self, self.embed(tokens))))


def attention(diagonal):
    def mix(_, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(diagonal)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    return mix


def convolution(*padding):
    return lambda model, x: model.conv(F.pad(x.mT, padding)).mT


MIXES = {
    "attention": (attention(0), False),
    "attention that sees one more": (attention(1), True),
    "convolution": (convolution(2, 0), False),
    "convolution with padding on both sides": (convolution(1, 1), True),
    "recurrence": (lambda model, x: model.rnn(x)[0], False),
    "recurrence from the end": (lambda model, x: model.rnn(x.flip(1))[0].flip(1), True),
    "rows and tokens in one dimension": (lambda _, x: (x + x.mean(1, True)).flatten(0, 1), True),
    "noise that differs in each call": (lambda _, x: x + torch.rand(()) * next(NOISE), False),
    "dropout that is always on": (lambda _, x: F.dropout(x, 0.5), False),
}
NOISE = iter(range(1, 1000))


@pytest.mark.parametrize("name", MIXES)
def test_a_model_whose_outputs_depend_on_later_tokens_is_found(name):
    mix, is_found = MIXES[name]
    model, state = Model(mix), torch.get_rng_state()
    model.rnn.eval()
    assert looks_ahead(model, (TOKENS,), {}, 0) is is_found
    assert looks_ahead(model, (), {"tokens": TOKENS}, 0) is is_found
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model.rnn.training) == (True, False)


IMAGES = torch.rand(6, 3, 8, generator=torch.Generator().manual_seed(0))
ROWS = {
    "a model of rows": (lambda x: x.tanh(), False),
    "a softmax of the rows": (lambda x: x.cumsum(1).softmax(0), True),
    "a mean that is taken off": (lambda x: (x - x.mean(0)).cumsum(1), True),
    "dimensions that are taken for others": (lambda x: x.reshape(8, 6, 3).transpose(0, 1), True),
    "dimensions that are exchanged": (lambda x: x.permute(2, 0, 1).transpose(0, 1), False),
    "rows and time in one": (lambda x: x.cumsum(1).flatten(0, 1), False),
    "time first": (lambda x: x.cumsum(0), False),
    "time first, the last of it": (lambda x: x.cumsum(0)[-1], False),
    "pairs of rows": (lambda x: x.flatten(1) @ x.flatten(1).T, False),
    "a loss": (lambda x: x.softmax(0).mean(), False),
    "noise": (lambda x: x.softmax(0) + next(NOISE), False),
    "a constant": (lambda x: torch.ones(6, 3), False),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_model_whose_rows_depend_on_each_other_is_found(name):
    compute, is_found = ROWS[name]
    model = nn.Module()
    model.forward = lambda x, times=None: compute(x)
    assert mixes_rows(model, (IMAGES,), {}) is is_found
    assert mixes_rows(model, (), {"x": IMAGES, "times": torch.ones(6)}) is is_found
    assert not mixes_rows(model, (IMAGES, torch.ones(2, 6)), {})  # as of a state
    assert not mixes_rows(model, (IMAGES, torch.ones(6, 6)), {})  # as of a graph
    assert not mixes_rows(model, (IMAGES[:1],), {})


WORDS = torch.arange(24).view(8, 3)


@pytest.mark.parametrize(("compared", "is_found"), [(1, True), (0, False)])
def test_rows_of_sequences_with_time_first_are_the_second_dimension(compared, is_found):
    """As of a decoder, which has no output for the first word, and may draw its own words."""
    weights = torch.rand(24, 5, generator=torch.Generator().manual_seed(0))
    model = nn.Module()
    model.forward = lambda source, target: (
        weights[source].cumsum(0)[1:] * (1 + int(random.random() < 0.5))
    ).softmax(compared)
    drawn = random.getstate()
    assert mixes_rows(model, (WORDS, WORDS), {}) is is_found
    assert mixes_rows(model, (torch.cat([WORDS, WORDS[:1]]), WORDS), {}) is is_found
    assert random.getstate() == drawn


def test_the_tokens_of_one_sequence_are_no_rows():
    tagger = nn.Sequential(nn.Embedding(24, 8), nn.LSTM(8, 5))
    tagger.forward = lambda words: tagger[1](tagger[0](words))[0]
    assert not mixes_rows(tagger, (torch.arange(9),), {})


@pytest.mark.parametrize("layer", [nn.LSTM(5, 6), nn.Conv2d(9, 9, 3, padding=1)])
def test_one_sequence_or_image_without_a_batch_dimension_has_no_rows(layer):
    given = torch.rand(9, 5) if isinstance(layer, nn.LSTM) else torch.rand(9, 4, 5)
    assert not mixes_rows(layer, (given,), {})
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_layer_that_takes_the_rows_of_a_loader_for_time_is_found(kind, batch_first):
    layer, model = kind(8, 4, batch_first=batch_first), nn.Module()
    model.layer = layer
    model.forward = lambda x: layer(x, x, x)[0] if kind is nn.MultiheadAttention else layer(x)[0]
    assert mixes_rows(model, (IMAGES,), {}, 6) is not batch_first
    assert not mixes_rows(model, (IMAGES.transpose(0, 1),), {}, 6), "its rows are second"
    assert not mixes_rows(model, (IMAGES,), {}), "the first dimension may be time"


@pytest.mark.parametrize(
    ("batch_first", "shuffle", "is_found"),
    [(False, True, True), (True, True, False), (False, False, False)],
    ids=["time first", "rows first", "parts of one sequence"],
)
def test_the_rows_of_a_loader_that_shuffles_are_independent(batch_first, shuffle, is_found):
    torch.manual_seed(0)
    torch._dynamo.utils.clear_compilation_metrics()
    loader = DataLoader(TensorDataset(torch.rand(48, 5, 8)), batch_size=6, shuffle=shuffle)
    layer = nn.LSTM(8, 8, batch_first=batch_first)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    loop = Follower("script", at_exit=lambda: None, recorded_steps=0)
    try:
        for _ in range(8):
            for (rows,) in loader:
                (layer(rows)[0] - rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        loop.try_model()
        found = loop.evidence()
    finally:
        loop.close()
    assert found.mixes_rows is is_found


def test_batch_norm_mixes_no_rows_in_evaluation():
    assert not mixes_rows(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24)), (IMAGES,), {})


def test_inputs_whose_next_tokens_are_targets_are_recognised():
    mask = torch.ones_like(TOKENS)
    later = TOKENS[:, 1:]
    ignored = torch.where(TOKENS.roll(-1, 1) < 25, -100, TOKENS.roll(-1, 1))
    assert predicted([mask, TOKENS], later) == 1
    assert predicted([TOKENS[:, :-1]], later.flatten()) == 0
    assert predicted([TOKENS], ignored) == 0
    assert predicted([TOKENS], TOKENS) is None  # as in masked models
    assert predicted([TOKENS, TOKENS.clone()], later) is None
    masked = torch.where(torch.arange(17) == 3, 0, TOKENS)
    assert predicted([masked, TOKENS], later) == 1  # an encoder's, and the decoder's
    runs = torch.arange(4).repeat_interleave(16).view(2, 32)
    assert predicted([runs], runs[:, 1:]) is None
    assert predicted([TOKENS.float()], later) is None
    assert predicted([TOKENS], torch.zeros(4, dtype=torch.long)) is None


def fails_in_evaluation(model, x):
    assert model.training
    return attention(1)(model, x)


@pytest.mark.parametrize(
    ("tries", "mix", "answer", "more"),
    [
        (True, attention(1), True, 3 + 4),
        (True, fails_in_evaluation, False, 0),
        (False, attention(1), None, 0),
    ],
    ids=["tried", "fails", "not tried"],
)
def test_a_loop_is_tried_only_where_nobody_needs_its_results(tries, mix, answer, more, caplog):
    torch.manual_seed(0)
    model, calls = Model(mix), []
    model.register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch._dynamo.utils.clear_compilation_metrics()  # of other tests: calls are not recorded then
    loop = Follower("script", at_exit=lambda: None, recorded_steps=0)
    try:
        for step in range(60):
            tokens = (TOKENS + step) % 50
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if tries:
            loop.try_model()
        found = loop.evidence()
    finally:
        loop.close()
    assert (found.looks_ahead, len(calls), caplog.messages) == (answer, 60 + more, [])


def test_targets_that_are_the_tokens_themselves_are_told_from_the_next_ones():
    assert are_own([TOKENS], TOKENS)
    assert are_own([torch.ones(4), TOKENS], TOKENS.flatten())
    masked = torch.where(torch.rand(TOKENS.shape) < 0.15, TOKENS, -100)
    for targets in (TOKENS.roll(-1, 1), TOKENS[:, 1:], masked, TOKENS.float()):
        assert not are_own([TOKENS], targets)
    assert not are_own([torch.ones_like(TOKENS)], torch.ones_like(TOKENS))
    assert are_own([TOKENS, TOKENS.clone(), torch.ones_like(TOKENS)], TOKENS)
    assert not are_own([TOKENS, TOKENS.roll(-1, 1)], TOKENS.roll(-1, 1))  # of its own loss
