"""Letters: D width, K eigenstates, E = 2 K, J eigenstates of a head."""

import pytest
import torch

from flatout.models.eigenstate import Eigenstate
from flatout.ops import Ops, cross_entropy, folding, scan
from flatout.ops.folding import RESONANCE, Weights

D, K, J = 5, 6, 3
SHAPES = {
    "fixed": {},
    "biases": {"bias": True},
    "one coarse scale": {"scales": (4,)},
    "hierarchical": {"scales": (1, 2, 4)},
    "selective": {"eigenvalues": "selective"},
}


def random_inputs(gains, *, bias=True):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    return Weights(
        normal(2 * K, D),
        normal(2 * K) if bias else None,
        tuple(normal(*shape) for shape in gains),
        normal(K, J),
        normal(D, 2 * K),
    )


def make_model(fold, dtype=torch.float64, **changes):
    """Return a network whose couplings are as large as its states, so that errors are visible."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 11,
        "num_layers": 2,
        "d_model": 16,
        "num_eigenstates": 12,
        "num_heads": 3,
    } | changes
    model = Eigenstate(
        Eigenstate.check(shape, seq_len=32),
        Ops.plain(scan=scan.chunked, cross_entropy=cross_entropy.fused, folding=fold),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("coupling", "share", "recurrence.drive.bias")):
                parameter.normal_(std=1 / RESONANCE if name.endswith("coupling") else 1.0)
    return model.to(dtype)


def with_gradients(model, doc_ids):
    tokens = torch.randint(11, (2, 33), generator=torch.Generator().manual_seed(1))
    loss, _ = model(tokens[:, :-1], tokens[:, 1:], doc_ids)
    loss.backward()
    return {"loss": loss.detach()} | {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_folding_changes_neither_loss_nor_gradients(changes, documents, poisoned_memory):
    doc_ids = (torch.arange(64) // 13).view(2, 32) if documents else None
    expected, actual = (
        with_gradients(make_model(fold, **changes), doc_ids)
        for fold in (folding.reference, folding.folded)
    )
    for name in expected:
        assert name == "loss" or expected[name].norm() > 0, f"{name} has no part in this"
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("changes", [{}, {"scales": (1, 2)}], ids=["fixed", "hierarchical"])
def test_a_folded_model_decodes_like_a_full_pass(changes):
    model, tokens = (
        make_model(folding.folded, **changes).eval(),
        torch.randint(11, (1, 20), generator=torch.Generator().manual_seed(2)),
    )
    reader = model.decoder()
    for piece in tokens.split([1, 7, 12], dim=1):
        logits = reader.read(piece)
    torch.testing.assert_close(
        logits,
        make_model(folding.reference, **changes).eval().logits(tokens)[:, -1],
        rtol=1e-10,
        atol=1e-10,
    )


def test_a_gain_that_tokens_share_is_folded_into_the_drive():
    weights = random_inputs([(K,)])
    actual = folding.folded(weights)
    hidden, gain = torch.randn(7, D, dtype=torch.float64), weights.gains[0]
    torch.testing.assert_close(
        hidden @ actual.drive.t() + actual.bias,
        (hidden @ weights.drive.t() + weights.bias) * torch.cat((gain, gain)),
    )
    assert actual.gains == (None,)
    assert folding.folded(random_inputs([(K,)], bias=False)).bias is None


@pytest.mark.parametrize(
    "gains", [[(2, 3, K)], [(K,), (K,)]], ids=["of each token", "of several recurrences"]
)
def test_other_gains_are_not_folded(gains):
    weights = random_inputs(gains)
    actual = folding.folded(weights)
    assert actual.gains == weights.gains
    assert actual.drive is weights.drive
    assert actual.coupling is None


def test_the_coupling_matches_its_docstring():
    """State j adds the others of its head: real to real parts, imaginary to imaginary parts."""
    weights, states = random_inputs([(K,)]), torch.randn(1, 1, 2 * K, dtype=torch.float64)
    expected = states.clone()
    for part in range(2):
        for k in range(K):
            for j in range(J):
                expected[..., part * K + k] += (
                    RESONANCE * weights.coupling[k, j] * states[..., part * K + k // J * J + j]
                )
    torch.testing.assert_close(folding.coupled(states, weights.coupling), expected)
    torch.testing.assert_close(
        states @ folding.folded(weights).output.t(), expected @ weights.output.t()
    )


def test_the_drive_stays_bf16_and_the_parameters_fp32():
    """This is the benefit of folding: autocast widens no tensor of the sequence's length."""
    seen = []

    def recording(log_decay, angle, drive_BTE, **others):
        seen.append(drive_BTE.dtype)
        return scan.triton_narrow(log_decay, angle, drive_BTE, **others)

    for fold in (folding.reference, folding.folded):
        model = make_model(fold, torch.float32, num_layers=1)
        model.blocks[0].recurrence.memories[0].ops = Ops.plain(scan=recording)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = with_gradients(model, None)
        assert all(gradient.dtype == torch.float32 for gradient in actual.values())
    assert seen == [torch.float32, torch.bfloat16]


def test_decoding_states_stay_fp32():
    model = make_model(folding.folded, torch.float32)
    for block in model.blocks:
        block.recurrence.memories[0].ops = Ops.plain(scan=scan.triton_narrow)
    reader = model.eval().decoder()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reader.read(torch.tensor([[1, 2, 3]]))
    assert {one.last.dtype for layer in reader._states for one in layer} == {torch.float32}
