import pytest
import torch

from flatout.models.layers import relu2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_relu2_and_its_gradient_match_the_formula(dtype):
    random_tokens = torch.randn(
        4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(dtype)
    random_tokens[0, :3] = torch.tensor([0.0, -0.0, float("inf")])
    hidden, plain = (random_tokens.clone().requires_grad_() for _ in range(2))
    out, expected = relu2(hidden), torch.where(plain > 0, plain, 0) ** 2
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    for tensor in (out, expected):
        tensor.backward(torch.full_like(tensor, 0.75))
    assert hidden.grad.dtype == dtype
    torch.testing.assert_close(hidden.grad, plain.grad)
