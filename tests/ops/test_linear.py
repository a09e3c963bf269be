"""Letters: I width in, O width out."""

import pytest
import torch
from attention_cases import assert_close_to_largest
from op_variants import variants

from flatout.models.layers import gelu, relu2
from flatout.ops import linear

VARIANTS = variants(linear)
CLOSE = {"bf16": 2e-2}
"""Tolerance of a variant against fp64, relative to the largest value; 1e-5 if not listed."""
CASES = {
    "plain": ((2, 8), 16, 11),
    "odd": ((3, 7), 5, 65),
    "one row": ((1,), 4, 3),
    "deep": ((2, 3, 5), 8, 8),
    "wide": ((129,), 3, 257),
    "none": ((0,), 4, 3),
}


def with_gradients(function, shape, width_in, width_out, dtype, *, bias):
    generator = torch.Generator().manual_seed(width_out)
    sizes = ((*shape, width_in), (width_out, width_in), (width_out,))
    tensors = [torch.randn(*size, generator=generator) for size in sizes[: 3 if bias else 2]]
    return results_of(function, [tensor.to(dtype) for tensor in tensors])


def results_of(function, tensors):
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = function(*leaves)
    out.backward(torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", VARIANTS)
def test_values_and_gradients_match_the_reference_in_fp64(name, case, bias, poisoned_memory):
    expected = with_gradients(linear.reference, *CASES[case], torch.float64, bias=bias)
    actual, again = (
        with_gradients(VARIANTS[name], *CASES[case], torch.float32, bias=bias) for _ in range(2)
    )
    assert all(map(torch.equal, actual, again))
    assert_close_to_largest(actual, expected, CLOSE.get(name, 1e-5))


@pytest.mark.parametrize("name", VARIANTS)
def test_other_dtypes_and_autocast_work(name):
    for dtype in (torch.bfloat16, torch.float64):
        assert with_gradients(VARIANTS[name], *CASES["plain"], dtype, bias=True)[0].dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert VARIANTS[name](torch.randn(2, 4), torch.randn(3, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("activation", [relu2, gelu], ids=["relu2", "gelu"])
@pytest.mark.parametrize("rows", [2, 33])
def test_a_narrow_activation_between_two_products_changes_no_result(name, activation, rows):
    """The second product and all gradients are equal with the activation inside and outside."""
    function, results = VARIANTS[name], []
    for inside in (True, False):

        def two_products(hidden, up, down, inside=inside):
            if inside:
                return function(function(hidden, up, activation=activation), down)
            return function(activation(function(hidden, up)), down)

        generator = torch.Generator().manual_seed(1)
        sizes = ((rows, 16), (48, 16), (24, 48))
        tensors = [torch.randn(*size, generator=generator) for size in sizes]
        results.append(results_of(two_products, tensors))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rows", [2, 33])
def test_results_of_bf16_matmuls_stay_in_bfloat16(rows, bias):
    """Those of few rows of fp32 are computed in fp32."""
    weights = torch.randn(7, 16), torch.randn(7) if bias else None
    hidden = torch.randn(rows, 16)
    assert linear.bf16(hidden, *weights).dtype == (torch.float32 if rows == 2 else torch.bfloat16)
    assert linear.bf16(hidden.bfloat16(), *weights).dtype == torch.bfloat16


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_are_narrowed_where_matmuls_return_bfloat16(name):
    hidden, function = torch.randn(5, 4), VARIANTS[name]
    for dtype in (torch.float32, torch.float64, torch.float16):
        is_narrow = name == "bf16" and dtype == torch.float32
        expected = torch.bfloat16 if is_narrow else dtype
        assert linear.narrowed(hidden.to(dtype), function).dtype == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert linear.narrowed(hidden, function).dtype == torch.bfloat16
        assert linear.narrowed(hidden.double(), function).dtype == torch.float64
    with torch.autocast("cpu", torch.float16):
        expected = torch.bfloat16 if name == "bf16" else torch.float32
        assert linear.narrowed(hidden, function).dtype == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_frozen_factors_get_no_gradient(name):
    hidden, weight = torch.randn(5, 4), torch.randn(3, 4, requires_grad=True)
    VARIANTS[name](hidden, weight).sum().backward()
    assert hidden.grad is None
    torch.testing.assert_close(
        weight.grad, hidden.sum(0).expand(3, -1), rtol=CLOSE.get(name, 1e-5), atol=1e-5
    )
