"""Letters: H query heads, G key and value heads, C head size."""

from functools import partial

import pytest
import torch
from op_variants import variants
from torch.autograd import gradcheck

from flatout.errors import ShapeError
from flatout.ops import heads

VARIANTS = variants(heads)
CASES = {
    "one head": {"counts": (1, 1), "head_dim": 2, "tokens": 1},
    "equal": {"counts": (4, 4), "head_dim": 8, "tokens": 16},
    "grouped, odd": {"counts": (6, 2), "head_dim": 6, "tokens": 37},
    "normalised alone": {"counts": (3, 1), "head_dim": 7, "tokens": 5, "rotated": False},
    "turned alone": {"counts": (2, 2), "head_dim": 10, "tokens": 19, "normalised": False},
    "cut alone": {
        "counts": (2, 1),
        "head_dim": 3,
        "tokens": 4,
        "normalised": False,
        "rotated": False,
    },
}


def random_inputs(
    *, counts, head_dim, tokens, normalised=True, rotated=True, rows=2, dtype=torch.float32
):
    """Return a product, gains, and tables for positions from 5 on."""
    generator = torch.Generator().manual_seed(head_dim * 100 + tokens)
    product = torch.randn(
        rows,
        tokens,
        (counts[0] + 2 * counts[1]) * head_dim,
        generator=generator,
        dtype=torch.float64,
    )
    gain = (
        torch.rand(sum(counts), head_dim, generator=generator, dtype=torch.float64) + 0.5
        if normalised
        else None
    )
    cos = sin = None
    if rotated:
        angle = torch.arange(5, 5 + tokens)[:, None] * torch.rand(
            head_dim // 2, generator=generator
        )
        cos, sin = (
            torch.cat((angle.cos(), angle.cos()), dim=-1),
            torch.cat((-angle.sin(), angle.sin()), dim=-1),
        )
    return product.to(dtype), None if gain is None else gain.to(dtype), cos, sin


def with_gradients(function, tensors, counts):
    product, gain, cos, sin = tensors
    leaves = [leaf.clone().requires_grad_() for leaf in (product, gain) if leaf is not None]
    actual = function(leaves[0], leaves[1] if gain is not None else None, cos, sin, counts=counts)
    weights = [
        torch.cos(torch.arange(out.numel(), dtype=torch.float64) + i).view(out.shape).to(out.dtype)
        for i, out in enumerate(actual)
    ]
    torch.autograd.backward(actual, weights)
    return [*(out.detach() for out in actual), *(leaf.grad for leaf in leaves)]


def by_loops(product, gain, cos, sin, counts, eps=1e-5):
    """Compute each head of each token separately, as the docstring defines it."""
    num_turned = sum(counts)
    rows, tokens, width = product.shape
    head_dim = width // (num_turned + counts[1])
    cut = product.view(rows, tokens, -1, head_dim).clone()
    for row in range(rows):
        for token in range(tokens):
            for head in range(num_turned):
                vector = cut[row, token, head].clone()
                if gain is not None:
                    vector = vector / (vector.square().mean() + eps).sqrt() * gain[head]
                if cos is not None:
                    half = head_dim // 2
                    pair = torch.complex(vector[:half], vector[half:]) * torch.complex(
                        cos[token, :half], sin[token, half:]
                    ).to(torch.complex128)
                    vector = torch.cat((pair.real, pair.imag))
                cut[row, token, head] = vector
    return [part.transpose(1, 2) for part in cut.split((counts[0], counts[1], counts[1]), dim=2)]


@pytest.mark.parametrize("case", CASES)
def test_the_reference_matches_its_docstring(case):
    tensors, counts = random_inputs(**CASES[case], dtype=torch.float64), CASES[case]["counts"]
    for actual, expected in zip(
        heads.reference(*tensors, counts=counts), by_loops(*tensors, counts), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_uses_the_given_eps(name):
    tensors, counts = (
        random_inputs(**CASES["grouped, odd"], dtype=torch.float64),
        CASES["grouped, odd"]["counts"],
    )
    for actual, expected in zip(
        VARIANTS[name](*tensors, counts=counts, eps=0.5),
        by_loops(*tensors, counts, eps=0.5),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    actual, expected = (
        with_gradients(partial(function, eps=0.5), tensors, counts)
        for function in (VARIANTS[name], heads.reference)
    )
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", VARIANTS)
def test_values_and_gradients_match_the_reference_in_fp64(name, case, poisoned_memory):
    tensors, counts = random_inputs(**CASES[case], dtype=torch.float64), CASES[case]["counts"]
    expected = with_gradients(heads.reference, tensors, counts)
    actual = with_gradients(
        VARIANTS[name],
        tuple(None if tensor is None else tensor.float() for tensor in tensors),
        counts,
    )
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=1e-5 * max(float(want.abs().max()), 1)
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_match_finite_differences(name, case):
    product, gain, cos, sin = random_inputs(
        **CASES[case] | {"tokens": 3}, rows=1, dtype=torch.float64
    )
    leaves = [leaf.requires_grad_() for leaf in (product, gain) if leaf is not None]
    assert gradcheck(
        lambda *given: VARIANTS[name](given[0], gain, cos, sin, counts=CASES[case]["counts"]),
        tuple(leaves),
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_low_precision_is_widened_internally(name, poisoned_memory):
    tensors = random_inputs(counts=(4, 2), head_dim=8, tokens=9, dtype=torch.bfloat16)
    expected = with_gradients(heads.reference, tuple(tensor.double() for tensor in tensors), (4, 2))
    for got, want in zip(with_gradients(VARIANTS[name], tensors, (4, 2)), expected, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(
            got.double(), want, rtol=2e-2, atol=2e-2 * max(float(want.abs().max()), 1)
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_frozen_products_get_no_gradient(name):
    product, gain, cos, sin = random_inputs(counts=(2, 1), head_dim=4, tokens=3)
    gain.requires_grad_()
    sum(out.sum() for out in VARIANTS[name](product, gain, cos, sin, counts=(2, 1))).backward()
    assert product.grad is None
    assert gain.grad is not None


def test_mismatched_shapes_are_rejected_with_a_fix():
    product, gain, cos, sin = random_inputs(counts=(4, 2), head_dim=8, tokens=6)
    wrong = [
        ((product[..., :-1], gain, cos, sin), (4, 2)),
        ((product, gain[:5], cos, sin), (4, 2)),
        ((product, gain, cos[:5], sin[:5]), (4, 2)),
        ((product, gain, cos, None), (4, 2)),
        ((product, gain, cos, sin), (4, 4)),
    ]
    for function in VARIANTS.values():
        for tensors, counts in wrong:
            with pytest.raises(ShapeError, match="Fix:"):
                function(*tensors, counts=counts)
