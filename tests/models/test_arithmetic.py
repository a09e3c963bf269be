"""Every model with other matmuls, autocast, bf16 weights and torch.compile."""

import pytest
import torch
from model_shapes import PLAIN, SMALL, every_model, make_model, random_tokens
from op_variants import variants

from flatout.config.registry import MODELS
from flatout.ops import Ops, attention, cross_entropy, heads, linear, scan

pytestmark = pytest.mark.slow


@every_model
@pytest.mark.parametrize("product", variants(linear))
def test_any_product_gives_the_same_loss_and_gradients(shape, product):
    fused = {"attention": attention.fused, "cross_entropy": cross_entropy.fused}
    ops = Ops.plain(**fused, linear=variants(linear)[product])
    require_equal(product, *(make_model(shape, each, dropout=0.0) for each in (ops, PLAIN)))


def require_equal(product, actual, expected, call=None):
    """Compare loss and gradients of two models, the first one called by `call`."""
    losses = [model(*random_tokens())[0] for model in (actual if call is None else call, expected)]
    for loss_sum in losses:
        loss_sum.backward()
    assert_close(product, *losses)
    for one, other in zip(actual.parameters(), expected.parameters(), strict=True):
        assert_close(product, one.grad, other.grad)


def assert_close(product, actual, expected):
    """Compare within the precision of the matmul."""
    limit = {"bf16": 3e-2}.get(product, 1e-4)
    torch.testing.assert_close(
        actual, expected, rtol=limit, atol=limit * max(float(expected.detach().abs().max()), 1)
    )


@every_model
def test_repeated_steps_give_the_same_bits(shape):
    def gradients():
        model = make_model(shape)
        torch.manual_seed(3)
        model(*random_tokens())[0].backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


@every_model
def test_autocast_keeps_loss_and_norms_fp32_and_narrows_hidden_states_of_transformers(shape):
    model = make_model(shape, dropout=0.0)
    dtype = torch.bfloat16 if shape[0] == "transformer" else torch.float32
    tokens, targets = random_tokens()
    wide = model(tokens, targets)[0]
    seen = []
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.register_forward_hook(lambda _, x, y: seen.append(x[0].dtype == y.dtype))
    for block in model.blocks:
        block.register_forward_hook(lambda _, x, y: seen.append(y.dtype == dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss_sum, _ = model(tokens, targets)
    loss_sum.backward()
    assert seen
    assert all(seen)
    assert loss_sum.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(loss_sum, wide, rtol=0.02, atol=0.0)
    loss_sum, _ = make_model(shape).to(torch.bfloat16)(tokens, targets)
    loss_sum.backward()
    assert loss_sum.dtype == torch.float32, "with bf16 weights too"


# torch's own compiler still calls torch.jit
@pytest.mark.quick_cases("transformer-reference", "eigenstate-bf16")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("product", variants(linear))
@pytest.mark.parametrize("kind", MODELS.names())
def test_it_compiles_without_a_graph_break(kind, product):
    """Loss and gradients equal those of eager mode.

    Generated code is tested with the tolerances of the speedups that compile.
    """
    losses, gathers = variants(cross_entropy), variants(attention)
    ops = Ops.plain(
        attention=gathers.get(product, attention.fused),
        cross_entropy=losses.get(product, cross_entropy.fused),
        linear=variants(linear)[product],
        heads=heads.fused,
        scan=scan.chunked,
    )
    known, small = MODELS.get(kind).Config.model_fields, SMALL | {"num_layers": 1}
    shape = kind, tuple((key, value) for key, value in small.items() if key in known)
    compiled = make_model(shape, ops)
    call = torch.compile(compiled, fullgraph=True, dynamic=False, backend="aot_eager")
    require_equal(product, compiled, make_model(shape), call)
