"""What every model must pass. A model is any file of flatout/models that holds MODEL; a new one is
tested with nothing added here.

Letters: B rows, T tokens, D width, V vocabulary.
"""

import functools
import math
import shutil
from dataclasses import fields
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flatout.errors import ConfigError
from flatout.models.language_model import LanguageModel
from flatout.ops import Ops, attention, cross_entropy, heads, linear, scan, variants
from flatout.registry import MODELS

PLAIN = Ops.plain()
FAST = Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused, scan=scan.chunked)
VOCAB = 61
SEQ_LEN = 17

TRANSFORMERS = {
    "default": {},
    "gpt2": {
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu",
        "bias": True,
        "dropout": 0.1,
    },
    "llama": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "activation": "swiglu",
        "num_kv_heads": 2,
        "tied_head": False,
    },
    "relu2, qk norm, window": {
        "activation": "relu2",
        "qk_norm": True,
        "window": 5,
        "tied_head": False,
        "bias": True,
    },
    "own head size": {"head_dim": 6, "num_kv_heads": 1, "d_ff": 40, "norm": "rmsnorm"},
}
EIGENSTATES = {
    "default": {},
    "hierarchical": {"scales": (1, 2, 4, 8), "tied_head": False},
    "selective": {"eigenvalues": "selective", "bias": True, "dropout": 0.1, "num_eigenstates": 12},
}
SHAPES = {"transformer": TRANSFORMERS, "eigenstate": EIGENSTATES}
SMALL = {"num_layers": 2, "d_model": 32, "num_heads": 4}


def shapes():
    """Every model of the registry in its shapes; one of which none are known as it is by default,
    with what it shares of SMALL.
    """
    for kind in MODELS.names():
        known = MODELS.get(kind).Config.model_fields
        small = {key: value for key, value in SMALL.items() if key in known}
        for name, own in SHAPES.get(kind, {"default": {}}).items():
            yield pytest.param((kind, tuple((small | own).items())), id=f"{kind}: {name}")


every_model = pytest.mark.parametrize("shape", list(shapes()))


def made(shape, ops=FAST, *, seed=0, seq_len=SEQ_LEN, **changes) -> LanguageModel:
    kind, own = shape
    model_class = MODELS.get(kind)
    torch.manual_seed(seed)
    values = dict(own) | {
        key: value for key, value in changes.items() if key in model_class.Config.model_fields
    }
    return model_class(model_class.check(values | {"vocab_size": VOCAB}, seq_len=seq_len), ops)


def drawn(rows=3, seq_len=SEQ_LEN, seed=1):
    windows = torch.randint(
        VOCAB, (rows, seq_len + 1), generator=torch.Generator().manual_seed(seed)
    )
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@every_model
def test_uses_names_the_functions_that_it_calls(shape):
    """A speedup of a function that the model never calls is refused by this list."""
    called = set()

    def noting(name):
        plain = getattr(PLAIN, name)
        return lambda *values, **named: called.add(name) or plain(*values, **named)

    model = made(shape, Ops(**{field.name: noting(field.name) for field in fields(Ops)}))
    model(*drawn())
    assert called == {"cross_entropy", *MODELS.stated(shape[0], "USES")}


@every_model
def test_causal_proved_from_gradients(shape):
    """What is predicted at t depends on every token up to t (within a window, over the layers) and
    on none after it.
    """
    model = made(shape, dropout=0.0).double()
    reach = (getattr(model.config, "window", None) or SEQ_LEN) * len(model.blocks)
    tokens, _ = drawn(rows=1)
    found = []
    embed = model.embed
    model.embed = lambda tokens_BT: found.append(embed(tokens_BT)) or found[0]
    logits = model.logits(tokens)
    for t in range(SEQ_LEN):
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), found[0], retain_graph=True)
        touched = gradient[0].abs().sum(dim=-1)
        assert not touched[t + 1 :].any()
        assert (touched[max(0, t - reach + len(model.blocks)) : t + 1] > 0).all()


def mixed_shapes():
    """Every model in its shapes, with every variant of what carries something from token to token
    in it.
    """
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
    """Return the second document's logits and what its loss changes: the second's embedded tokens,
    and every parameter.
    """
    found = []
    embed = type(model).embed

    def poisoned(tokens_BT):
        hidden_BTD = embed(model, tokens_BT).detach()
        found.append(
            (
                hidden_BTD
                if poison is None
                else hidden_BTD.masked_fill(ids[..., None] == 0, poison)
            ).requires_grad_()
        )
        return found[-1]

    model.embed = poisoned
    model.zero_grad()
    logits = model.logits(tokens, ids)[:, 8:]
    logits.square().sum().backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return logits.detach(), found[-1].grad[:, 8:], gradients


@pytest.mark.parametrize(("shape", "mixer"), list(mixed_shapes()))
def test_packed_documents_do_not_leak(shape, mixer):
    """With ids, another first document moves no bit of the second one's logits and gradients;
    without, it does.
    """
    op, ops = mixer
    model = made(shape, ops).eval()
    tokens, _ = drawn()
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
    assert [
        name
        for name, gradient in gradients.items()
        if not torch.equal(gradient, gradients_after[name])
    ] == []
    if (
        op == "scan"
    ):  # attention weighs what it may not see with 0, and 0 x NaN is NaN, in its kernels as in its definition
        logits_after, inputs_after, _ = through_two_documents(model, tokens, ids, poison=math.nan)
        assert torch.equal(logits, logits_after)
        assert torch.equal(inputs, inputs_after)


@every_model
def test_overfits_one_batch(shape):
    model = made(shape, dropout=0.0)
    tokens, targets = drawn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        loss_sum, num_valid = model(tokens, targets)
        optimizer.zero_grad()
        (loss_sum / num_valid).backward()
        optimizer.step()
    assert float(model(tokens, targets)[0].detach() / targets.numel()) < 0.1


def only_visible(q_BHTC, k_BGSC, v_BGSC, *, doc_ids_BT=None, window=None):
    """Attention that multiplies each query with the keys it sees and no others."""
    repeats = q_BHTC.shape[1] // k_BGSC.shape[1]
    k_BHSC, v_BHSC = k_BGSC.repeat_interleave(repeats, 1), v_BGSC.repeat_interleave(repeats, 1)
    rows = []
    for t in range(q_BHTC.shape[2]):
        seen = slice(max(0, t + 1 - (window or t + 1)), t + 1)
        scores = (
            q_BHTC[:, :, t : t + 1]
            @ k_BHSC[:, :, seen].transpose(-2, -1)
            / math.sqrt(q_BHTC.shape[-1])
        )
        rows.append(scores.softmax(-1) @ v_BHSC[:, :, seen])
    return torch.cat(rows, dim=2)


@every_model
@pytest.mark.parametrize("seq_len", [1, 4, SEQ_LEN])
def test_flops_are_those_that_torch_counts(shape, seq_len):
    """The square against the reference attention, the causal count against one that multiplies
    visible keys only; both exactly.
    """
    rows = 2
    counted = {}
    for name, ops in {"palm": PLAIN, "causal_exact": Ops.plain(attention=only_visible)}.items():
        model = made(shape, ops)
        with FlopCounterMode(display=False) as counter:
            model(*drawn(rows, seq_len))[0].backward()
        counted[name] = Fraction(counter.get_total_flops(), rows * seq_len)
    stated = made(shape).flops_per_token(seq_len)
    assert {"palm": Fraction(stated.palm), "causal_exact": stated.causal_exact} == counted
    assert MODELS.get(shape[0]).count_flops(made(shape).config, seq_len) == stated


@every_model
def test_every_parameter_has_a_kind(shape):
    model = made(shape)
    kinds = model.parameter_kinds()
    assert list(kinds) == [name for name, _ in model.named_parameters()]
    assert set(kinds.values()) <= {"hidden", "embedding", "head", "vector"}
    for name, parameter in model.named_parameters():
        assert (kinds[name] == "vector") == (parameter.dim() == 1)
    for name, rows in model.stacked_rows().items():
        assert kinds[name] == "hidden"
        assert sum(rows) == model.get_parameter(name).shape[0]


@every_model
def test_every_parameter_learns(shape):
    model = made(shape)
    model(*drawn())[0].backward()
    assert [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ] == []


@every_model
def test_parameters_are_counted_without_memory(shape):
    model = made(shape)
    assert MODELS.get(shape[0]).num_parameters(model.config) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert {
        parameter.device.type for parameter in type(model).on_meta(model.config, FAST).parameters()
    } == {"meta"}


@every_model
def test_a_model_from_meta_is_the_model(shape):
    model, empty = made(shape), type(made(shape)).on_meta(made(shape).config, FAST)
    empty.to_empty(device="cpu")
    torch.manual_seed(0)
    empty.init_weights()
    tokens, targets = drawn()
    assert torch.equal(empty.eval()(tokens, targets)[0], model.eval()(tokens, targets)[0])


@every_model
def test_fresh_weights_know_nothing(shape):
    """The first loss is log V: within 3%, and not below by more than chance."""
    model = made(shape, num_layers=4)
    tokens, targets = drawn(rows=64)
    loss_sum, num_valid = model.eval()(tokens, targets)
    assert float(loss_sum.detach() / num_valid) == pytest.approx(math.log(VOCAB), rel=0.03)


@every_model
def test_dropout_follows_the_generator(shape):
    model = made(shape, dropout=0.5)
    if "dropout" not in type(model.config).model_fields:
        pytest.skip("this model has no dropout")

    def loss(seed):
        torch.manual_seed(seed)
        return float(model(*drawn())[0].detach())

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)
    model.eval()
    assert loss(1) == loss(2)


@every_model
def test_ignored_targets_count_for_nothing(shape):
    model = made(shape, dropout=0.0)
    tokens, targets = drawn()
    half = targets.clone()
    half[:, ::2] = -1
    loss_sum, num_valid = model(tokens, half)
    losses = nn.functional.cross_entropy(
        model.logits(tokens).flatten(0, 1), targets.flatten(), reduction="none"
    ).view_as(targets)
    assert int(num_valid) == int((half >= 0).sum())
    torch.testing.assert_close(loss_sum, losses[half >= 0].sum())


@every_model
@pytest.mark.parametrize("product", variants(linear))
def test_any_product_gives_the_same_loss_and_gradients(shape, product):
    found = made(
        shape,
        Ops.plain(
            attention=attention.fused,
            cross_entropy=cross_entropy.fused,
            linear=variants(linear)[product],
        ),
        dropout=0.0,
    )
    wanted = made(shape, PLAIN, dropout=0.0)
    losses = [model(*drawn())[0] for model in (found, wanted)]
    for loss_sum in losses:
        loss_sum.backward()
    assert_close(product, *losses)
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert_close(product, one.grad, other.grad)


def assert_close(product, found, wanted):
    """Within what the product's arithmetic allows."""
    limit = {"bf16": 3e-2}.get(product, 1e-4)
    torch.testing.assert_close(
        found, wanted, rtol=limit, atol=limit * max(float(wanted.detach().abs().max()), 1)
    )


@every_model
def test_repeated_steps_are_equal_in_every_bit(shape):
    def gradients():
        model = made(shape)
        torch.manual_seed(3)
        model(*drawn())[0].backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


@every_model
def test_the_last_logits_are_the_last_of_all(shape):
    model = made(shape).eval()
    tokens, _ = drawn(seq_len=9)
    torch.testing.assert_close(model.next_logits(tokens), model.logits(tokens)[:, -1])


@every_model
def test_autocast_keeps_loss_norms_and_hidden_states_wide(shape):
    model = made(shape, dropout=0.0)
    tokens, targets = drawn()
    wide = model(tokens, targets)[0]
    seen = []
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.register_forward_hook(
                lambda module, inputs, output: seen.append(inputs[0].dtype == output.dtype)
            )
    for block in model.blocks:
        block.register_forward_hook(
            lambda module, inputs, output: seen.append(output.dtype == torch.float32)
        )
    with torch.autocast("cpu", torch.bfloat16):
        loss_sum, _ = model(tokens, targets)
    loss_sum.backward()
    assert seen
    assert all(seen)
    assert loss_sum.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(loss_sum, wide, rtol=0.02, atol=0.0)


@every_model
def test_weights_in_bf16_run_too(shape):
    model = made(shape).to(torch.bfloat16)
    loss_sum, _ = model(*drawn())
    loss_sum.backward()
    assert loss_sum.dtype == torch.float32


@every_model
def test_checkpoint_names_are_parameters_alone(shape):
    """No tables, no name twice: what is saved is what was learned."""
    model = made(shape)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("kind", MODELS.names())
def test_unknown_and_wrong_keys_are_named(kind):
    model_class = MODELS.get(kind)
    with pytest.raises(ConfigError, match=r"model\.vocab_siz.*model\.vocab_size"):
        model_class.check({"vocab_siz": 10, "vocab_size": 10}, seq_len=8)
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        model_class.check({"vocab_size": 0}, seq_len=8)


@functools.cache
def compiler():
    return shutil.which("g++") or shutil.which("clang++")


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own compiler still calls torch.jit
@pytest.mark.skipif(compiler() is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.parametrize("product", variants(linear))
@pytest.mark.parametrize("kind", MODELS.names())
def test_compiles_whole(kind, product):
    """One graph, no break, the same loss and gradients."""
    losses, gathers = variants(cross_entropy), variants(attention)
    ops = Ops.plain(
        attention=gathers.get(product, attention.fused),
        cross_entropy=losses.get(product, cross_entropy.fused),
        linear=variants(linear)[product],
        heads=heads.fused,
        scan=scan.chunked,
    )
    shape = (
        kind,
        tuple(
            {
                key: value
                for key, value in (SMALL | {"num_layers": 1}).items()
                if key in MODELS.get(kind).Config.model_fields
            }.items()
        ),
    )
    plain, compiled = made(shape), made(shape, ops)
    call = torch.compile(compiled, fullgraph=True, dynamic=False)
    wanted, found = plain(*drawn())[0], call(*drawn())[0]
    wanted.backward()
    found.backward()
    assert_close(product, found, wanted)
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert_close(product, one.grad, other.grad)


def test_a_key_of_another_kind_is_answered_with_that_kind():
    """As when model.kind=eigenstate is stated over a recipe for a transformer."""
    eigenstate = MODELS.get("eigenstate")
    with pytest.raises(
        ConfigError,
        match=r"has no model.activation and model.qk_norm, which the model 'transformer' has.*begin from a recipe",
    ):
        eigenstate.check({"vocab_size": 10, "activation": "relu2", "qk_norm": True}, seq_len=8)
    with pytest.raises(ConfigError, match=r"Did you mean 'model.d_model'"):
        eigenstate.check({"vocab_size": 10, "d_modle": 4}, seq_len=8)
