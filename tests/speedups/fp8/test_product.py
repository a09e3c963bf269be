"""Products in fp8 are close to those in bf16, and everything else falls back to the reference.

Letters: I width in, O width out.
"""

import pytest
import torch

from flatout.ops import linear
from flatout.speedups.fp8.product import fp8


def with_gradients(function, shape, width_in, width_out, dtype, *, bias):
    generator = torch.Generator().manual_seed(width_out)
    drawn = [
        torch.randn(*size, generator=generator)
        for size in ((*shape, width_in), (width_out, width_in), (width_out,))
    ]
    leaves = [tensor.to(dtype).requires_grad_() for tensor in drawn[: 3 if bias else 2]]
    out = function(*leaves)
    out.backward(
        torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(dtype)
    )
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_fp8_is_close_to_bf16_forward_and_backward(bias):
    """e4m3 has three bits of mantissa, e5m2 two: a few percent of a product of random numbers."""
    pytest.importorskip("torchao")
    case = ((4, 16), 64, 48)
    wanted = with_gradients(linear.reference, *case, torch.bfloat16, bias=bias)
    found = with_gradients(fp8, *case, torch.bfloat16, bias=bias)
    for got, want in zip(found[:3], wanted[:3], strict=True):
        assert got.dtype == torch.bfloat16
        assert 5e-3 * want.norm() < (got - want).norm() < 0.1 * want.norm()
    for got, want in zip(found[3:], wanted[3:], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sizes_and_dtypes_that_the_hardware_cannot_multiply_fall_back(dtype):
    for case in (((5,), 64, 48), ((16,), 60, 48), ((16,), 64, 40), ((0,), 64, 48)):
        wanted, found = (
            with_gradients(function, *case, dtype, bias=True)
            for function in (linear.reference, fp8)
        )
        assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))
