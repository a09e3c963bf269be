import pytest
import torch
from torch import nn

from flatout.config.sections import OptimConfig
from flatout.ops.newton_schulz import batched
from flatout.optim.adamw import build, fused, per_parameter
from flatout.optim.groups import OptimizerParts

CONFIG = OptimConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
KINDS = {"table": "embedding", "inner": "hidden", "gain": "vector", "head": "head"}
SHAPES = {"table": (7, 4), "inner": (4, 6), "gain": (4,), "head": (7, 4)}


class Tiny(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)))

    def parameter_kinds(self):
        return KINDS


def reference(weight, gradients, rates, decay):
    """AdamW for one parameter, as published (Loshchilov and Hutter 2019, algorithm 2)."""
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    beta1, beta2 = CONFIG.betas
    for number, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        mean, variance = first / (1 - beta1**number), second / (1 - beta2**number)
        weight = weight - rate * mean / (variance.sqrt() + CONFIG.eps) - rate * decay * weight
    return weight


def trained(factory, dtype, gradients, rates):
    model = Tiny(dtype)
    (optimizer,) = build(model, CONFIG, OptimizerParts(factory, batched))
    for number, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name][number].to(dtype)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture
def gradients():
    generator = torch.Generator().manual_seed(2)
    return {
        name: [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(6)]
        for name, shape in SHAPES.items()
    }


RATES = [0.01, 0.02, 0.02, 0.015, 0.01, 0.005]


@pytest.mark.parametrize("factory", [per_parameter, fused])
def test_equals_the_formula(factory, gradients):
    actual = trained(factory, torch.float64, gradients, RATES)
    start = {name: parameter.detach() for name, parameter in Tiny(torch.float64).named_parameters()}
    for name, kind in KINDS.items():
        decay = CONFIG.weight_decay if kind in ("hidden", "head") else 0.0
        torch.testing.assert_close(
            actual[name],
            reference(start[name], gradients[name], RATES, decay),
            rtol=1e-12,
            atol=1e-13,
        )
