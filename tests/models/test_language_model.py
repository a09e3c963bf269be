"""Tests that every model must pass.

A model is any file in flatout/models with MODEL. A new one needs no new test code.

Letters: B rows, T tokens, D width, V vocabulary.
"""

import math
from dataclasses import fields
from fractions import Fraction

import pytest
import torch
from model_shapes import FAST, PLAIN, SEQ_LEN, VOCAB, every_model, make_model, random_tokens, shapes
from op_variants import variants
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flatout.config.registry import MODELS
from flatout.errors import ConfigError
from flatout.ops import Ops, attention, scan


@every_model
def test_uses_lists_the_ops_that_it_calls(shape):
    """Speedups of other ops are rejected by this list."""
    called = set()

    def recording(name):
        plain = getattr(PLAIN, name)
        return lambda *values, **named: called.add(name) or plain(*values, **named)

    model = make_model(shape, Ops(**{field.name: recording(field.name) for field in fields(Ops)}))
    model(*random_tokens())
    assert called == {"cross_entropy", *MODELS.stated(shape[0], "USES")}


@every_model
def test_gradients_prove_causality(shape):
    """The logits at t depend on all tokens up to t within the layers' windows, and on no others."""
    model = make_model(shape, dropout=0.0).double()
    reach = (getattr(model.config, "window", None) or SEQ_LEN) * len(model.blocks)
    tokens, _ = random_tokens(rows=1)
    actual = []
    embed = model.embed
    model.embed = lambda tokens_BT: actual.append(embed(tokens_BT)) or actual[0]
    logits = model.logits(tokens)
    for t in range(SEQ_LEN):
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), actual[0], retain_graph=True)
        touched = gradient[0].abs().sum(dim=-1)
        assert not touched[t + 1 :].any()
        assert (touched[max(0, t - reach + len(model.blocks)) : t + 1] > 0).all()


def mixed_shapes():
    """Yield every model in its shapes, with every variant of the ops that mix tokens."""
    for shape in shapes():
        for op, module in {"attention": attention, "scan": scan}.items():
            if op in MODELS.stated(shape.values[0][0], "USES"):
                for name, function in variants(module).items():
                    yield pytest.param(
                        *shape.values,
                        (op, Ops.plain(**{op: function})),
                        id=f"{shape.id}: {op} {name}",
                    )


def through_two_documents(model, tokens, ids, poison=None):
    """Return the second document's logits, and the gradients of its loss.

    The gradients are those to its embedded tokens and to all parameters.
    """
    actual = []
    embed = type(model).embed

    def poisoned(tokens_BT):
        hidden_BTD = embed(model, tokens_BT).detach()
        if poison is not None:
            hidden_BTD = hidden_BTD.masked_fill(ids[..., None] == 0, poison)
        actual.append(hidden_BTD.requires_grad_())
        return actual[-1]

    model.embed = poisoned
    model.zero_grad()
    logits = model.logits(tokens, ids)[:, 8:]
    logits.square().sum().backward()
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    gradients = {name: gradient for name, gradient in named if gradient is not None}
    return logits.detach(), actual[-1].grad[:, 8:], gradients


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "mixer"), list(mixed_shapes()))
def test_packed_documents_do_not_leak(shape, mixer):
    """Replacing the first document changes no bit of the second one's logits and gradients.

    Without document ids it does.
    """
    op, ops = mixer
    model = make_model(shape, ops).eval()
    tokens, _ = random_tokens()
    other = tokens.clone()
    other[:, :8] = (tokens[:, :8] + 1) % VOCAB
    ids = (torch.arange(SEQ_LEN) >= 8).int().expand(3, -1)
    with torch.no_grad():
        assert not torch.equal(model.logits(tokens, ids)[:, :8], model.logits(other, ids)[:, :8])
        assert not torch.equal(model.logits(tokens)[:, 8:], model.logits(other)[:, 8:])
    logits, inputs, gradients = through_two_documents(model, tokens, ids)
    assert inputs.any()
    logits_after, inputs_after, gradients_after = through_two_documents(model, other, ids)
    assert torch.equal(logits, logits_after)
    assert torch.equal(inputs, inputs_after)
    assert gradients.keys() == gradients_after.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_after[name]), name
    # In the kernels of attention masked values get the weight 0, and 0 x NaN is NaN.
    if op == "scan":
        logits_after, inputs_after, _ = through_two_documents(model, tokens, ids, poison=math.nan)
        assert torch.equal(logits, logits_after)
        assert torch.equal(inputs, inputs_after)


@pytest.mark.quick_cases(
    "eigenstate: default",
    "transformer: default",
    "transformer: llama",
    "transformer: relu2, qk norm, window",
)
@pytest.mark.slow
@every_model
def test_overfits_one_batch(shape):
    model = make_model(shape, dropout=0.0)
    tokens, targets = random_tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        loss_sum, num_valid = model(tokens, targets)
        optimizer.zero_grad()
        (loss_sum / num_valid).backward()
        optimizer.step()
    assert float(model(tokens, targets)[0].detach() / targets.numel()) < 0.1


def only_visible(q_BHTC, k_BGSC, v_BGSC, *, doc_ids_BS=None, window=None, softcap=None, mask=None):
    """Compute attention with only the products of queries and visible keys."""
    repeats = q_BHTC.shape[1] // k_BGSC.shape[1]
    k_BHSC, v_BHSC = k_BGSC.repeat_interleave(repeats, 1), v_BGSC.repeat_interleave(repeats, 1)
    rows = []
    for t in range(q_BHTC.shape[2]):
        seen = slice(max(0, t + 1 - (window or t + 1)), t + 1)
        scores = q_BHTC[:, :, t : t + 1] @ k_BHSC[:, :, seen].transpose(-2, -1)
        rows.append((scores / math.sqrt(q_BHTC.shape[-1])).softmax(-1) @ v_BHSC[:, :, seen])
    return torch.cat(rows, dim=2)


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("seq_len", [1, 4, SEQ_LEN])
def test_flops_match_torchs_count(shape, seq_len):
    """PaLM's count matches the reference; the causal count, attention to visible keys only."""
    rows = 2
    counted = {}
    for name, ops in {"palm": PLAIN, "causal_exact": Ops.plain(attention=only_visible)}.items():
        model = make_model(shape, ops)
        with FlopCounterMode(display=False) as counter:
            model(*random_tokens(rows, seq_len))[0].backward()
        counted[name] = Fraction(counter.get_total_flops(), rows * seq_len)
    stated = make_model(shape).flops_per_token(seq_len)
    assert {"palm": Fraction(stated.palm), "causal_exact": stated.causal_exact} == counted
    assert MODELS.get(shape[0]).count_flops(make_model(shape).config, seq_len) == stated


@every_model
def test_every_parameter_has_a_kind_and_learns_and_checkpoints_have_no_others(shape):
    model = make_model(shape)
    kinds, parameters = model.parameter_kinds(), dict(model.named_parameters())
    assert list(kinds) == list(parameters) == list(model.state_dict())
    assert set(kinds.values()) <= {"hidden", "embedding", "head", "vector"}
    model(*random_tokens())[0].backward()
    for name, parameter in parameters.items():
        assert (kinds[name] == "vector") == (parameter.dim() == 1)
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    for name, rows in model.stacked_rows().items():
        assert kinds[name] == "hidden"
        assert sum(rows) == parameters[name].shape[0]


@every_model
def test_a_model_from_the_meta_device_equals_the_model(shape):
    model = make_model(shape)
    empty = type(model).on_meta(model.config, FAST)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert MODELS.get(shape[0]).num_parameters(model.config) == numel
    empty.to_empty(device="cpu")
    torch.manual_seed(0)
    empty.init_weights()
    tokens, targets = random_tokens()
    assert torch.equal(empty.eval()(tokens, targets)[0], model.eval()(tokens, targets)[0])


@every_model
def test_the_initial_loss_is_that_of_chance(shape):
    """The initial loss is log V within 3%, and not below it by more than chance."""
    model = make_model(shape, num_layers=4)
    tokens, targets = random_tokens(rows=64)
    loss_sum, num_valid = model.eval()(tokens, targets)
    assert float(loss_sum.detach() / num_valid) == pytest.approx(math.log(VOCAB), rel=0.03)


@every_model
def test_dropout_depends_on_the_generator_only(shape):
    model = make_model(shape, dropout=0.5)
    if "dropout" not in type(model.config).model_fields:
        pytest.skip("this model has no dropout")

    def loss(seed):
        torch.manual_seed(seed)
        return float(model(*random_tokens())[0].detach())

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)
    model.eval()
    assert loss(1) == loss(2)


@every_model
def test_ignored_targets_do_not_count(shape):
    model = make_model(shape, dropout=0.0)
    tokens, targets = random_tokens()
    half = targets.clone()
    half[:, ::2] = -1
    loss_sum, num_valid = model(tokens, half)
    logits = model.logits(tokens)
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    assert int(num_valid) == int((half >= 0).sum())
    torch.testing.assert_close(loss_sum, losses[half >= 0].sum())
    torch.testing.assert_close(model.next_logits(tokens), logits[:, -1])


def test_a_key_of_another_kind_names_that_kind():
    """It happens when model.kind=eigenstate overrides a recipe for a transformer."""
    check = MODELS.get("eigenstate").check
    words = r"has no model.activation and model.qk_norm\. .*'transformer' does.*start from"
    with pytest.raises(ConfigError, match=words):
        check({"vocab_size": 10, "activation": "relu2", "qk_norm": True}, seq_len=8)
    with pytest.raises(ConfigError, match=r"Did you mean 'model.d_model'"):
        check({"vocab_size": 10, "d_modle": 4}, seq_len=8)
