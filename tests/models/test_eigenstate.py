"""Tests for the eigenstate network only; test_language_model.py covers what all models share."""

import math

import pytest
import torch
from op_variants import variants
from torch.nn import functional

from flatout.config.sections import OptimConfig
from flatout.errors import ConfigError, ShapeError
from flatout.models.eigenstate import GATE_BIAS, Eigenstate, Eigenvalues
from flatout.ops import Ops, cross_entropy, newton_schulz, scan
from flatout.optim import muon
from flatout.optim.adamw import per_parameter
from flatout.optim.groups import OptimizerParts

pytestmark = pytest.mark.slow

FAST = Ops.plain(scan=scan.chunked, cross_entropy=cross_entropy.fused)
SMALL = {"vocab_size": 11, "num_layers": 2, "d_model": 16, "num_eigenstates": 8, "num_heads": 2}


def make_model(seq_len=64, ops=FAST, seed=0, **changes):
    torch.manual_seed(seed)
    return Eigenstate(Eigenstate.check(SMALL | changes, seq_len=seq_len), ops)


def tokens_of(rows, tokens):
    return torch.randint(11, (rows, tokens), generator=torch.Generator().manual_seed(1))


def eigenvalues_of(model):
    return [module for module in model.modules() if isinstance(module, Eigenvalues)]


def magnitudes(model):
    return torch.cat([(-each.log_rate.exp()).exp() for each in eigenvalues_of(model)]).detach()


def traced(model, tokens, ids=None):
    """Return the embedded tokens and the logits, for gradients of one by the other."""
    embedded, embed = [], model.embed
    model.embed = lambda tokens_BT: embedded.append(embed(tokens_BT)) or embedded[0]
    return model.logits(tokens, ids), embedded[0]


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000])
def test_results_do_not_depend_on_the_chunk_size(chunk_size):
    plain = make_model(ops=Ops.plain()).double()
    chunked = make_model(chunk_size=chunk_size).double()
    tokens = tokens_of(2, 50)
    expected, actual = (model(tokens, tokens)[0] for model in (plain, chunked))
    expected.backward()
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("device", "configured", "chosen"),
    [("cpu", "auto", 32), ("meta", "auto", 128), ("cpu", 256, 256), ("meta", 7, 7)],
)
def test_auto_chooses_the_chunk_size_by_device(device, configured, chosen):
    """Any device but a CPU counts as a GPU. A run that resumes elsewhere chooses again."""
    seen = []

    def noted(decay, angle, drive, *, chunk_size, **_):
        seen.append(chunk_size)
        return drive

    model = make_model(ops=Ops.plain(scan=noted), chunk_size=configured).to(device)
    model.logits(tokens_of(1, 4).to(device))
    assert set(seen) == {chosen}


def test_learned_positions_are_added_and_limit_the_length():
    model = make_model(seq_len=16, positions="learned")
    tokens = tokens_of(1, 16)
    assert model.config.max_seq_len == model.max_seq_len == model.decoder().max_tokens == 16
    expected = model.token_embedding(tokens) + model.position_embedding.weight
    assert torch.equal(model.embed(tokens), expected)
    with pytest.raises(ShapeError, match="exceeds the model's 16 positions"):
        model.logits(tokens_of(1, 17))
    assert make_model(seq_len=8, positions="learned", max_seq_len=12).decoder(99).max_tokens == 12
    assert make_model(seq_len=16).logits(tokens_of(1, 200)).isfinite().all(), "any length without"


def test_initial_time_constants_range_from_one_token_to_the_sequence():
    many = {"seq_len": 4096, "num_layers": 8, "num_eigenstates": 64}
    time_constants = -1 / magnitudes(make_model(**many)).log()
    assert 1 <= time_constants.min() < 3
    assert 1500 < time_constants.max() <= 4096.5
    assert time_constants.log().mean() == pytest.approx(math.log(4096) / 2, rel=0.1), "log-uniform"
    assert magnitudes(make_model(seq_len=4096, memory=10)).max() <= math.exp(-0.1)
    published = magnitudes(make_model(**many, initialisation="published"))
    assert published.max() <= 0.5, "seven tokens"


def test_an_optimizer_step_rotates_old_states_only_slightly():
    """If angles were learned in radians, a step of 0.01 would rotate a state of 4,096 tokens ago
    six times.
    """
    for eigenvalues in eigenvalues_of(make_model(seq_len=4096, num_eigenstates=64)):
        log_decay, before = eigenvalues()
        with torch.no_grad():
            eigenvalues.detuning += 0.01
        turned = (eigenvalues()[1] - before) / -log_decay
        torch.testing.assert_close(turned, torch.full_like(turned, 0.01), rtol=0.02, atol=5e-3)


@pytest.mark.parametrize("count", [8, 64, 333, 1024])
def test_initial_angles_differ_from_each_other_and_from_zero(count):
    eigenvalues = eigenvalues_of(make_model(num_eigenstates=count, num_heads=1))[0]
    places = eigenvalues()[1].sort().values / (2 * math.pi)
    gaps = torch.diff(places, prepend=torch.zeros(1), append=torch.ones(1))
    assert 0.3 / count < gaps.min()
    assert gaps.max() < 2 / count


def test_the_drive_has_unit_variance_at_any_width():
    for width in (16, 256):
        model = make_model(d_model=width, num_eigenstates=64)
        block = model.blocks[0]
        drive = block.recurrence.drive(block.recurrence_norm(model.embed(torch.arange(11)[None])))
        assert float(drive.detach().square().mean()) == pytest.approx(1, rel=0.2)


def test_no_eigenvalue_exceeds_one():
    model = make_model()
    with torch.no_grad():
        for eigenvalues in eigenvalues_of(model):
            eigenvalues.log_rate.uniform_(-30, 30)
    assert magnitudes(model).max() <= 1
    loss, _ = model(tokens_of(1, 64), tokens_of(1, 64))
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_an_initial_gate_is_nearly_closed():
    """The general initialisation must not overwrite the bias of the gate."""
    parameters = make_model(bias=True).named_parameters()
    gates = [parameter for name, parameter in parameters if name.endswith("gate.bias")]
    assert len(gates) == 2
    assert all((gate == GATE_BIAS).all() for gate in gates)


def test_states_have_the_variance_of_their_drive():
    """White noise of variance 1 gives states of variance 1, whatever the time constant."""
    recurrence = make_model(seq_len=256, num_eigenstates=32).blocks[0].recurrence
    drive = torch.randn(4, 8192, 64, generator=torch.Generator().manual_seed(0))
    recurrence.drive = torch.nn.Identity()
    states = recurrence.states(drive)[:, 2048:].detach()
    assert float(states.var(dim=(0, 1)).mean()) == pytest.approx(1, rel=0.1)
    assert states.var(dim=(0, 1)).max() < 2


@pytest.mark.parametrize("variant", variants(scan))
def test_a_packed_document_has_the_same_logits_as_alone(variant):
    """They are equal up to rounding.

    A logit, here below 0.4, passes about forty operations, each of which rounds it by at most half
    an eps: 40 x 0.4 x 6e-8 in fp32.
    """
    model = make_model(ops=Ops.plain(scan=variants(scan)[variant]))
    lengths = (5, 1, 11, 8)
    tokens = tokens_of(1, sum(lengths))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 2e-15)):
        model.to(dtype)
        packed = model.logits(tokens, ids)
        alone = torch.cat([model.logits(part) for part in tokens.split(lengths, dim=1)], dim=1)
        torch.testing.assert_close(packed, alone, rtol=0, atol=tolerance)
    reader = model.eval().decoder()
    last = tokens[:, -lengths[-1] :]
    read = torch.stack([reader.read(last[:, t : t + 1]) for t in range(lengths[-1])], dim=1)
    torch.testing.assert_close(packed[:, -lengths[-1] :], read, rtol=0, atol=2e-15)


def test_the_decoder_state_does_not_grow():
    reader = make_model().eval().decoder()
    sizes = set()
    for _ in range(40):
        reader.read(tokens_of(2, 3))
        sizes.add(sum(state.numel() for state in reader._states))
    assert len(sizes) == 1
    assert reader.max_tokens is None


KNOWN = 0.1
"""The loss when the right one of eight answers has a probability of nine tenths."""


def losses_of_recall(initialisation, steps, distance=4096):
    """Train to recall which of eight symbols came first; return the losses until it succeeds."""
    shape = {"num_layers": 1, "d_ff": 16, "num_eigenstates": 32, "num_heads": 4, "chunk_size": 32}
    model = make_model(seq_len=distance + 1, **shape, initialisation=initialisation)
    optimizers = muon.build(
        model,
        OptimConfig(kind="muon", lr=0.02, weight_decay=0.0),
        OptimizerParts(per_parameter, newton_schulz.reference),
    )
    symbols = torch.arange(8)
    tokens = torch.full((8, distance + 1), 8)
    tokens[:, 0], tokens[:, -1] = symbols, 9
    losses = []
    while len(losses) < steps and min(losses, default=math.inf) > KNOWN:
        logits = model.next_logits(tokens)
        loss = functional.cross_entropy(logits, symbols)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses, float((logits.argmax(dim=-1) == symbols).float().mean())


@pytest.mark.thorough
def test_a_token_4096_back_can_be_learned():
    losses, accuracy = losses_of_recall("long-memory", steps=250)
    assert losses[-1] < KNOWN
    assert accuracy == 1


def test_the_published_memory_has_no_gradient_4096_tokens_back():
    """So that it cannot learn what long memory learns."""
    traces = {}
    for initialisation in ("long-memory", "published"):
        model = make_model(seq_len=4097, initialisation=initialisation)
        logits, embedded = traced(model, tokens_of(1, 4097))
        (gradient,) = torch.autograd.grad(logits[0, -1].square().sum(), embedded)
        traces[initialisation] = float(gradient[0, 0].norm())
    assert traces["long-memory"] > 1e-7
    assert traces["published"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_eigenstates": 10, "num_heads": 4}, "model.num_heads=5"),
        ({"chunk_size": 0}, "model.chunk_size"),
        ({"chunk_size": "fast"}, "model.chunk_size"),
        ({"max_seq_len": 16}, r"has no effect.*model\.positions=learned"),
        ({"positions": "learned", "max_seq_len": 8}, r"exceeds the model's 8 positions"),
    ],
)
def test_inconsistent_shapes_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_model(seq_len=16, **changes)
