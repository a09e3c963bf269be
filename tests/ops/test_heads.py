"""Letters: H query heads, G key and value heads, C head size."""

import itertools
from functools import partial

import pytest
import torch
from attention_cases import assert_close_to_largest
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
    "cut alone": {"counts": (2, 1), "head_dim": 3, "tokens": 4}
    | {"normalised": False, "rotated": False},
}


def random_inputs(
    *, counts, head_dim, tokens, normalised=True, rotated=True, rows=2, dtype=torch.float32
):
    """Return a product, gains, and tables for positions from 5 on."""
    generator = torch.Generator().manual_seed(head_dim * 100 + tokens)
    wide = {"generator": generator, "dtype": torch.float64}
    product = torch.randn(rows, tokens, (counts[0] + 2 * counts[1]) * head_dim, **wide).to(dtype)
    gain = cos = sin = None
    if normalised:
        gain = (torch.rand(sum(counts), head_dim, **wide) + 0.5).to(dtype)
    if rotated:
        frequency = torch.rand(head_dim // 2, generator=generator)
        angle = torch.arange(5, 5 + tokens)[:, None] * frequency
        cos = torch.cat((angle.cos(), angle.cos()), dim=-1)
        sin = torch.cat((-angle.sin(), angle.sin()), dim=-1)
    return product, gain, cos, sin


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
    cut, half = product.view(rows, tokens, -1, head_dim).clone(), head_dim // 2
    for row, token, head in itertools.product(range(rows), range(tokens), range(num_turned)):
        vector = cut[row, token, head].clone()
        if gain is not None:
            vector = vector / (vector.square().mean() + eps).sqrt() * gain[head]
        if cos is not None:
            turn = torch.complex(cos[token, :half], sin[token, half:]).to(torch.complex128)
            pair = torch.complex(vector[:half], vector[half:]) * turn
            vector = torch.cat((pair.real, pair.imag))
        cut[row, token, head] = vector
    return [part.transpose(1, 2) for part in cut.split((counts[0], counts[1], counts[1]), dim=2)]


@pytest.mark.parametrize("eps", [1e-5, 0.5])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_matches_the_docstring(name, case, eps):
    tensors, counts = random_inputs(**CASES[case], dtype=torch.float64), CASES[case]["counts"]
    actual = VARIANTS[name](*tensors, counts=counts, eps=eps)
    expected = by_loops(*tensors, counts, eps)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    functions = [partial(function, eps=eps) for function in (VARIANTS[name], heads.reference)]
    actual, expected = (with_gradients(function, tensors, counts) for function in functions)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", VARIANTS)
def test_values_and_gradients_match_the_reference_in_fp64(
    name, case, dtype, limit, poisoned_memory
):
    tensors, counts = random_inputs(**CASES[case], dtype=dtype), CASES[case]["counts"]
    wide = [None if tensor is None else tensor.double() for tensor in tensors]
    expected = with_gradients(heads.reference, wide, counts)
    actual = with_gradients(VARIANTS[name], tensors, counts)
    assert {each.dtype for each in actual} == {dtype}
    assert_close_to_largest(actual, expected, limit)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_match_finite_differences(name, case):
    facts = CASES[case] | {"tokens": 3, "rows": 1, "dtype": torch.float64}
    product, gain, cos, sin = random_inputs(**facts)
    leaves = tuple(leaf.requires_grad_() for leaf in (product, gain) if leaf is not None)
    counts = CASES[case]["counts"]
    assert gradcheck(lambda *given: VARIANTS[name](given[0], gain, cos, sin, counts=counts), leaves)


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
