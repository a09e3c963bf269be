import math

import pytest
import torch
from attention_cases import assert_close_to_largest
from op_variants import variants

from flatout.errors import ShapeError
from flatout.ops import at_least_fp32, cross_entropy

VARIANTS = variants(cross_entropy)
CLOSE = {"bf16": 2e-2}
"""Tolerance of a variant against fp64, relative to the largest value; 1e-5 if not listed."""

CASES = {
    "plain": {"rows": 2, "tokens": 8, "width": 16, "vocab": 11, "ignored": 0.0},
    "some ignored": {"rows": 3, "tokens": 7, "width": 5, "vocab": 65, "ignored": 0.4},
    "odd": {"rows": 1, "tokens": 129, "width": 3, "vocab": 257, "ignored": 0.1},
    "one target": {"rows": 1, "tokens": 1, "width": 4, "vocab": 3, "ignored": 0.0},
    "all ignored": {"rows": 2, "tokens": 3, "width": 4, "vocab": 9, "ignored": 1.1},
}
EXTRAS = {
    "none": {},
    "softcap": {"softcap": 2.0},
    "z-loss": {"z_loss": 1e-2},
    "both": {"softcap": 3.0, "z_loss": 1e-1},
}


@pytest.fixture(params=[False, True], ids=["one chunk", "small chunks"])
def chunks(request, monkeypatch):
    """Run with one chunk, and with chunks of a few targets, the last of them incomplete."""
    if request.param:
        monkeypatch.setitem(cross_entropy.LOGITS_AT_ONCE, "cpu", 700)


def random_inputs(*, rows, tokens, width, vocab, ignored):
    generator = torch.Generator().manual_seed(tokens * vocab)
    hidden = torch.randn(rows, tokens, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator)
    targets = torch.randint(vocab, (rows, tokens), generator=generator)
    is_ignored = torch.rand(rows, tokens, generator=generator) < ignored
    return hidden, weight, targets.masked_fill(is_ignored, cross_entropy.IGNORED)


def with_gradients(function, hidden, weight, targets, **extras):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss_sum, num_valid = function(hidden, weight, targets, **extras)
    loss_sum.backward()
    return loss_sum.detach(), num_valid, hidden.grad, weight.grad


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_frozen_weight_has_no_gradient_and_changes_no_other(name):
    hidden, weight, targets = random_inputs(**CASES["some ignored"])
    loss_sum, _, wanted, _ = with_gradients(VARIANTS[name], hidden, weight, targets)
    hidden.requires_grad_()
    found, _ = VARIANTS[name](hidden, weight, targets)
    found.backward()
    assert weight.grad is None
    assert torch.equal(found, loss_sum)
    assert torch.equal(hidden.grad, wanted)


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("case", CASES)
def test_the_reference_matches_its_docstring(case, extras):
    hidden, weight, targets = random_inputs(**CASES[case])
    cap, z_loss = EXTRAS[extras].get("softcap"), EXTRAS[extras].get("z_loss", 0.0)
    loss_sum, num_valid = cross_entropy.reference(
        hidden.double(), weight.double(), targets, softcap=cap, z_loss=z_loss
    )
    expected = 0.0
    for row, target in zip(hidden.double().flatten(0, 1), targets.flatten().tolist(), strict=True):
        if target >= 0:
            scores = [float(row @ one) for one in weight.double()]
            scores = scores if cap is None else [cap * math.tanh(score / cap) for score in scores]
            log_sum = math.log(sum(math.exp(score - max(scores)) for score in scores)) + max(scores)
            expected += log_sum - scores[target] + z_loss * log_sum**2
    assert float(loss_sum) == pytest.approx(expected, rel=1e-12)
    assert int(num_valid) == int((targets >= 0).sum())
    assert num_valid.dtype == torch.int64


@pytest.mark.slow
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", VARIANTS)
def test_values_and_gradients_match_the_reference_in_fp64(
    name, case, extras, chunks, poisoned_memory
):
    hidden, weight, targets = random_inputs(**CASES[case])
    expected = with_gradients(
        cross_entropy.reference, hidden.double(), weight.double(), targets, **EXTRAS[extras]
    )
    actual = with_gradients(VARIANTS[name], hidden, weight, targets, **EXTRAS[extras])
    assert (actual[0].dtype, actual[0].dim()) == (torch.float32, 0)
    assert torch.equal(actual[1], expected[1])
    assert_close_to_largest(actual, expected, CLOSE.get(name, 1e-5))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", VARIANTS)
def test_ignored_targets_affect_neither_loss_nor_gradients(name, poison):
    hidden, weight, targets = random_inputs(**CASES["some ignored"])
    ignored = targets == cross_entropy.IGNORED
    plain = with_gradients(VARIANTS[name], hidden, weight, targets)
    hidden = hidden.masked_fill(ignored[..., None], poison)
    poisoned = with_gradients(VARIANTS[name], hidden, weight, targets)
    assert all(map(torch.equal, poisoned, plain))
    assert not poisoned[2][ignored].any()


@pytest.mark.parametrize("name", VARIANTS)
def test_low_precision_hidden_states_give_an_fp32_loss(name):
    hidden, weight, targets = random_inputs(**CASES["some ignored"])
    loss_sum, _ = VARIANTS[name](hidden.bfloat16(), weight.bfloat16(), targets)
    assert loss_sum.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert VARIANTS[name](hidden, weight, targets)[0].dtype == torch.float32


@pytest.mark.parametrize("name", VARIANTS)
def test_mismatched_shapes_are_rejected_with_a_fix(name):
    hidden, weight, targets = random_inputs(**CASES["plain"])
    for wrong in (
        (hidden, weight, targets[:, :3]),
        (hidden, weight[:, :3], targets),
        (hidden[..., :3], weight, targets),
    ):
        with pytest.raises(ShapeError, match="Fix:"):
            VARIANTS[name](*wrong)


def test_at_least_fp32_never_narrows():
    for narrow in (torch.float16, torch.bfloat16, torch.float32):
        assert at_least_fp32(torch.ones(1, dtype=narrow)).dtype == torch.float32
    assert at_least_fp32(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


# torch itself uses deprecated features when it compiles.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_chunked_loss_has_gradients():
    """torch 2.11 silently traces some autograd functions into ones whose gradients are all zero."""
    inputs = random_inputs(**CASES["plain"])
    compiled = torch.compile(cross_entropy.chunked, backend="aot_eager")
    results = [with_gradients(each, *inputs) for each in (cross_entropy.chunked, compiled)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def scaled_gradients(function, hidden, weight, targets, *, scale, dtype):
    """Return gradients of fp32 leaves, with products in `dtype` and the loss times `scale`."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss_sum, _ = function(hidden, weight, targets)
    (loss_sum * scale).backward()
    return hidden.grad, weight.grad


def sure_of_their_targets(vocab=11, width=6, targets=24):
    """Return hidden states that give all other tokens a probability of e^-19 (6e-9).

    The direction of the states affects neither of the gradients that the test compares.
    """
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(vocab, width, generator=generator)
    weight[:, 0], weight[0] = 0.0, torch.eye(width)[0]
    hidden = torch.zeros(1, targets, width)
    hidden[..., 0] = 19.0
    return hidden, weight, torch.zeros(1, targets, dtype=torch.int64)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_float16_keeps_small_gradients_that_the_loss_scale_preserves(name, chunks):
    """6e-9 is below the range of float16. A loss scale of 2^15 raises it to 2e-4."""
    inputs = sure_of_their_targets()
    (hidden, weight), (expected_hidden, expected_weight) = (
        scaled_gradients(function, *inputs, scale=2.0**15, dtype=dtype)
        for function, dtype in (
            (VARIANTS[name], torch.float16),
            (cross_entropy.reference, torch.float32),
        )
    )
    torch.testing.assert_close(weight[1:, 0], expected_weight[1:, 0], rtol=1e-2, atol=0)
    expected = expected_hidden[..., 1:]
    atol = 1e-2 * float(expected.abs().max())
    torch.testing.assert_close(hidden[..., 1:], expected, rtol=1e-2, atol=atol)


def test_float16_sums_gradients_beyond_its_range(chunks):
    """The gradients of 4,096 targets of one token are nearly 1 each, times the scale in SCALES."""
    targets = torch.zeros(1, 4096, dtype=torch.int64)
    inputs = torch.full((1, 4096, 4), 8.0), torch.zeros(11, 4), targets
    actual, expected = (
        scaled_gradients(function, *inputs, scale=1 / 4096, dtype=dtype)
        for function, dtype in (
            (cross_entropy.chunked, torch.float16),
            (cross_entropy.reference, torch.float32),
        )
    )
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("scale", [2.0**14, 2.0**24])
def test_float16_overflows_as_the_plain_loss(scale, chunks):
    """A hidden state's gradient of 2^14 x 8 exceeds 65,504, so the loss scale is halved."""
    hidden, weight, targets = random_inputs(**CASES["plain"])
    inputs = hidden, 8 * weight.sign(), targets
    plain, actual = (
        torch.isfinite(scaled_gradients(each, *inputs, scale=scale, dtype=torch.float16)[0])
        for each in (cross_entropy.fused, cross_entropy.chunked)
    )
    assert not plain.all()
    assert not actual.all()
    if scale == 2.0**14:  # with 2^24 the gradients of the logits overflow too, and so do all others
        assert torch.equal(actual, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_the_loss_is_not_rounded_to_the_dtype_of_the_products(dtype):
    """1/3 in bfloat16 is 0.2% too large, and would make all hidden gradients too large as well."""
    inputs = random_inputs(rows=4, tokens=64, width=32, vocab=65, ignored=0.1)
    whole, third = (
        scaled_gradients(cross_entropy.chunked, *inputs, scale=scale, dtype=dtype)[0].double()
        for scale in (1.0, 1 / 3)
    )
    share = float((third * whole).sum() / whole.square().sum())
    assert share == pytest.approx(1 / 3, rel=1e-4)
