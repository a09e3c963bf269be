import pytest
import torch
from functorch.compile import make_boxed_func

from flatout.models.layers import Embedding, gelu, nearest_divisor, relu2


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


@pytest.mark.parametrize(
    ("number", "wanted", "nearest"),
    [(1, 5, 1), (12, 5, 6), (36, 7, 6), (36, 5, 6), (97, 60, 97), (10**14, 7, 8)],
)
def test_the_nearest_divisor_is_found_of_the_largest_numbers_too(number, wanted, nearest):
    assert nearest_divisor(number, wanted) == nearest


def with_gradient(function, leaf, grad):
    out = function()
    (found,) = torch.autograd.grad(out, leaf, grad.to(out.dtype))
    return out.detach(), found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler causes them itself
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_of_a_compiled_model_is_that_of_an_eager_one(dtype):
    hidden = torch.linspace(-60, 60, 1001).to(dtype).requires_grad_()
    compiled = torch.compile(gelu, backend="aot_eager")
    grad = torch.linspace(-1, 1, 1001)
    eager = with_gradient(lambda: gelu(hidden), hidden, grad)
    limit = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for got, expected in zip(
        with_gradient(lambda: compiled(hidden), hidden, grad), eager, strict=True
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_embedding_leaves_its_gradient_to_torch():
    embedding = Embedding(50, 8)
    torch.nn.init.normal_(embedding.weight)
    tokens_BT = torch.randint(0, 40, (3, 17))
    grad, targets = torch.randn(3, 17, 8), []

    def noted(graph, _inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=noted, bw_compiler=noted)
    compiled = torch.compile(embedding, backend=backend)
    eager = with_gradient(lambda: embedding(tokens_BT), embedding.weight, grad)
    found = with_gradient(lambda: compiled(tokens_BT), embedding.weight, grad)
    assert "flatout.added_rows.default" in targets
    assert all(map(torch.equal, found, eager))
