import pytest
import torch
from torch import nn
from torch.optim import SGD

from flatout.config import registry
from flatout.config.schema import load_config
from flatout.config.sections import OptimConfig
from flatout.errors import ConfigError
from flatout.ops.newton_schulz import batched
from flatout.optim.adamw import per_parameter
from flatout.optim.groups import OptimizerParts, adamw_for, named_by_kind, optimizers_of


class Tiny(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self.kinds = kinds

    def parameter_kinds(self):
        return self.kinds


PLAIN = OptimizerParts(per_parameter, batched)
KINDS = {
    "table.weight": "embedding",
    "inner.weight": "hidden",
    "inner.bias": "vector",
    "head.weight": "embedding",
}


def test_a_tied_parameter_is_counted_once():
    assert list(named_by_kind(Tiny(KINDS))) == ["table.weight", "inner.weight", "inner.bias"]


def test_frozen_parameters_are_omitted():
    model = Tiny(KINDS)
    model.inner.bias.requires_grad_(False)
    assert "inner.bias" not in named_by_kind(model)


@pytest.mark.parametrize(
    "kinds", [{**KINDS, "inner.weight": "matrix"}, {"table.weight": "embedding"}]
)
def test_a_model_must_state_every_kind(kinds):
    with pytest.raises(ConfigError, match=r"inner\.weight"):
        named_by_kind(Tiny(kinds))


def test_only_hidden_matrices_and_the_head_decay():
    parameters = {
        kind: nn.Parameter(torch.zeros(2, 2)) for kind in ("hidden", "embedding", "head", "vector")
    }
    config = OptimConfig(lr=0.5, weight_decay=0.25)
    groups = adamw_for(parameters.items(), config, PLAIN).param_groups
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(parameters["hidden"]), id(parameters["head"])],
        [id(parameters["embedding"]), id(parameters["vector"])],
    ]
    assert all(group["lr"] == group["peak_lr"] == 0.5 for group in groups)


def test_empty_groups_are_omitted():
    vector = ("vector", nn.Parameter(torch.zeros(2)))
    assert len(adamw_for([vector], OptimConfig(), PLAIN).param_groups) == 1


def single(model, config, parts):
    return SGD([{"params": list(model.parameters()), "peak_lr": config.lr}], lr=config.lr)


def listed(model, config, parts):
    return [single(model, config, parts)]


def without_peak_lr(model, config, parts):
    return (SGD(model.parameters(), lr=config.lr),)


def of_weight_alone(model, config, parts):
    return (SGD([{"params": [model.weight], "peak_lr": config.lr}], lr=config.lr),)


def twice(model, config, parts):
    return [*listed(model, config, parts), *of_weight_alone(model, config, parts)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (single, r"returned a single SGD, not a tuple of torch optimizers"),
        (lambda model, config, parts: None, r"returned None, not a tuple"),
        (lambda model, config, parts: (), r"returned \(\), not a tuple of torch optimizers"),
        (
            lambda parameters, lr: None,
            r"cannot be called as build\(model, config, parts\): too many positional arguments",
        ),
        (SGD, r"is a class, not a function"),
        (without_peak_lr, r"a parameter group without peak_lr"),
        (of_weight_alone, r"has bias in 0 of its groups, not one"),
        (twice, r"has weight in 2 of its groups, not one"),
    ],
)
def test_a_user_optimizer_that_breaks_the_contract_is_named(monkeypatch, build, message):
    monkeypatch.setattr(registry.Folder, "get", lambda self, name: build)
    with pytest.raises(ConfigError, match=message):
        optimizers_of(load_config(None, ["optim.kind=my:own"]), nn.Linear(2, 2), parts=None)


def test_a_list_of_optimizers_is_accepted(monkeypatch):
    monkeypatch.setattr(registry.Folder, "get", lambda self, name: listed)
    assert (
        len(optimizers_of(load_config(None, ["optim.kind=my:own"]), nn.Linear(2, 2), parts=None))
        == 1
    )


def test_an_optimizer_need_not_have_frozen_parameters(monkeypatch):
    monkeypatch.setattr(registry.Folder, "get", lambda self, name: of_weight_alone)
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert len(optimizers_of(load_config(None, ["optim.kind=my:own"]), model, parts=None)) == 1
