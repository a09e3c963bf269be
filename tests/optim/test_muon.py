import math

import pytest
import torch
from op_variants import variants
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.config.sections import OptimConfig
from flatout.errors import ConfigError
from flatout.ops import newton_schulz
from flatout.ops.newton_schulz import reference
from flatout.optim import muon
from flatout.optim.adamw import LightAdamW, fused, per_parameter
from flatout.optim.groups import OptimizerParts
from flatout.optim.muon import Muon, build

ITERATIONS = {
    name: function for name, function in variants(newton_schulz).items() if name != "bf16"
}
SHAPES = [(6, 6), (4, 10), (10, 4), (4, 10), (1, 5), (6, 6)]


def plain_newton_schulz(matrix):
    """Iterate one matrix as published, in its own orientation."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / matrix.norm()
    for _ in range(5):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x


def plain_muon(weight, gradients, rate, decay, momentum):
    """Update one matrix: momentum, Nesterov look-ahead, orthogonalisation, scale."""
    mean = torch.zeros_like(weight)
    for gradient in gradients:
        mean = momentum * mean + (1 - momentum) * gradient
        ahead = momentum * mean + (1 - momentum) * gradient
        step = 0.2 * math.sqrt(max(weight.shape)) * plain_newton_schulz(ahead)
        weight = weight - rate * decay * weight - rate * step
    return weight


def random_matrix(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("variant", ITERATIONS)
@pytest.mark.parametrize("limit", [2**27, 30])
def test_a_batch_of_many_shapes_equals_one_matrix_at_a_time(monkeypatch, limit, variant):
    monkeypatch.setattr(muon, "STACK_ELEMENTS", limit)
    weights = [nn.Parameter(random_matrix(shape, 10 + i)) for i, shape in enumerate(SHAPES)]
    gradients = [
        [random_matrix(shape, 100 * step + i) for step in range(4)]
        for i, shape in enumerate(SHAPES)
    ]
    expected = [
        plain_muon(w.detach(), g, 0.02, 0.3, 0.9) for w, g in zip(weights, gradients, strict=True)
    ]
    optimizer = Muon(
        weights, lr=0.02, weight_decay=0.3, momentum=0.9, newton_schulz=ITERATIONS[variant]
    )
    for step in range(4):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient[step].clone()
        optimizer.step()
        assert all(torch.equal(w.grad, g[step]) for w, g in zip(weights, gradients, strict=True))
    for weight, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("limit", [2**27, 30])
@pytest.mark.parametrize("rows", [(4, 4, 4), (8, 2, 2), (5, 7)], ids=str)
def test_stacked_matrices_are_updated_separately(monkeypatch, limit, rows):
    monkeypatch.setattr(muon, "STACK_ELEMENTS", limit)
    whole, other = nn.Parameter(random_matrix((12, 6), 1)), nn.Parameter(random_matrix((6, 4), 2))
    apart = [nn.Parameter(part.clone()) for part in whole.detach().split(rows)]
    gradients = [random_matrix((12, 6), 50 + step) for step in range(4)]
    expected = [
        plain_muon(part.detach(), [g.split(rows)[i] for g in gradients], 0.02, 0.3, 0.9)
        for i, part in enumerate(apart)
    ]
    stacked = Muon(
        [whole, other], lr=0.02, weight_decay=0.3, momentum=0.9, stacked_rows={whole: rows}
    )
    separate = Muon(apart, lr=0.02, weight_decay=0.3, momentum=0.9)
    for gradient in gradients:
        whole.grad, other.grad = gradient.clone(), random_matrix((6, 4), 3)
        for part, part_gradient in zip(apart, gradient.split(rows), strict=True):
            part.grad = part_gradient.clone()
        stacked.step()
        separate.step()
    torch.testing.assert_close(whole.detach(), torch.cat(expected), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        whole.detach(), torch.cat([part.detach() for part in apart]), rtol=1e-12, atol=1e-14
    )
    assert stacked.state[whole]["momentum_buffer"].shape == (12, 6)
    assert {name for group in stacked.state_dict()["param_groups"] for name in group} == {
        "params",
        "lr",
        "weight_decay",
        "momentum",
    }


def test_a_zero_gradient_leaves_only_the_decay():
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.zeros(3, 4)
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), torch.full((3, 4), 0.95))


def test_parameters_without_gradient_are_skipped():
    moved, still = nn.Parameter(torch.eye(3)), nn.Parameter(torch.eye(3))
    moved.grad = torch.eye(3)
    Muon([moved, still], lr=0.1).step()
    assert torch.equal(still.detach(), torch.eye(3))
    assert not torch.equal(moved.detach(), torch.eye(3))


def test_a_closure_runs_with_gradients_enabled():
    weight = nn.Parameter(torch.eye(2))

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert Muon([weight], lr=0.1).step(closure).item() == 2


class Tiny(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        shapes = {
            "table": (7, 4),
            "inner": (4, 4),
            "gain": (4,),
            "filter": (4, 4, 2),
            "head": (7, 4),
        }
        for name in kinds:
            setattr(self, name, nn.Parameter(torch.ones(shapes[name])))

    def parameter_kinds(self):
        return self.kinds


@pytest.mark.parametrize("factory", [per_parameter, fused])
def test_muon_gets_hidden_matrices_and_adamw_the_rest(factory):
    model = Tiny(
        {
            "table": "embedding",
            "inner": "hidden",
            "gain": "vector",
            "filter": "hidden",
            "head": "head",
        }
    )
    first, second = build(
        model,
        OptimConfig(lr=0.3, momentum=0.8, weight_decay=0.2),
        OptimizerParts(factory, reference),
    )
    assert isinstance(first, Muon)
    assert isinstance(second, torch.optim.AdamW)
    (group,) = first.param_groups
    assert group["params"] == [model.inner]
    assert (group["lr"], group["peak_lr"], group["momentum"], group["weight_decay"]) == (
        0.3,
        0.3,
        0.8,
        0.2,
    )
    decayed, plain = second.param_groups
    assert [id(p) for p in decayed["params"]] == [id(model.filter), id(model.head)]
    assert [id(p) for p in plain["params"]] == [id(model.table), id(model.gain)]
    assert all(group["peak_lr"] == 0.3 for group in second.param_groups)


def test_a_model_declares_stacked_matrices():
    def weight_after_a_step(model):
        model.inner.grad = random_matrix((4, 4), 1, torch.float32)
        build(model, OptimConfig(lr=0.3), OptimizerParts(fused, reference))[0].step()
        return model.inner.detach()

    class Stacked(Tiny):
        def stacked_rows(self):
            return {"inner": self.rows}

    together, apart = Tiny({"inner": "hidden"}), Stacked({"inner": "hidden"})
    apart.rows = (3, 1)
    one, other = weight_after_a_step(together), weight_after_a_step(apart)
    parts = [nn.Parameter(torch.ones(rows, 4)) for rows in apart.rows]
    for part, gradient in zip(
        parts, random_matrix((4, 4), 1, torch.float32).split(apart.rows), strict=True
    ):
        part.grad = gradient
    Muon(
        parts, lr=0.3, weight_decay=OptimConfig().weight_decay, momentum=OptimConfig().momentum
    ).step()
    torch.testing.assert_close(other, torch.cat([part.detach() for part in parts]))
    assert not torch.allclose(one, other)
    for rows in ((3, 2), (4, 0), (5, -1)):
        apart.rows = rows
        with pytest.raises(ConfigError, match="splits the 4 rows of 'inner'"):
            build(apart, OptimConfig(), OptimizerParts(fused, reference))


def test_an_optimizer_without_parameters_is_omitted():
    assert [
        type(o)
        for o in build(Tiny({"inner": "hidden"}), OptimConfig(), OptimizerParts(fused, reference))
    ] == [Muon]
    assert [
        type(o)
        for o in build(Tiny({"gain": "vector"}), OptimConfig(), OptimizerParts(fused, reference))
    ] == [LightAdamW]


# torch itself uses deprecated features when it compiles.
def test_large_stacks_are_divided(monkeypatch):
    monkeypatch.setattr(muon, "STACK_ELEMENTS", 4 * 12)
    sizes = []
    weights = [nn.Parameter(random_matrix((3, 4), seed)) for seed in range(6)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    Muon(weights, lr=0.1, newton_schulz=lambda stack: sizes.append(len(stack)) or stack).step()
    assert sizes == [4, 2]


def test_a_step_makes_few_calls_and_never_waits_for_the_device():
    """The number of calls does not grow with the number of matrices, unless they are sharded."""

    def calls_of(count):
        weights = [
            nn.Parameter(random_matrix(shape, seed, torch.float32))
            for seed in range(count)
            for shape in ((6, 6), (4, 10), (10, 4))
        ]
        optimizer = Muon(weights, lr=0.02, newton_schulz=newton_schulz.batched)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        with Recorder() as recorded:
            optimizer.step()
        return [
            name
            for name in recorded.names
            if not name.startswith(
                (
                    "aten.slice",
                    "aten.select",
                    "aten.t.",
                    "aten.unbind",
                    "aten.transpose",
                    "aten.permute",
                )
            )
        ]

    few, many = calls_of(1), calls_of(8)
    assert len(few) == len(many)
    assert not {"aten._local_scalar_dense.default", "aten.item.default"} & {*many}


class Recorder(TorchDispatchMode):
    """Records the names of the calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
