import pytest
import torch
from torch import nn

from flatout.config import OptimConfig
from flatout.errors import ConfigError
from flatout.optimizers.groups import adamw_groups, named_by_kind


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


KINDS = {"table.weight": "embedding", "inner.weight": "hidden", "inner.bias": "vector", "head.weight": "embedding"}


def test_a_tied_parameter_is_counted_once():
    assert list(named_by_kind(Tiny(KINDS))) == ["table.weight", "inner.weight", "inner.bias"]


def test_frozen_parameters_are_left_out():
    model = Tiny(KINDS)
    model.inner.bias.requires_grad_(False)
    assert "inner.bias" not in named_by_kind(model)


@pytest.mark.parametrize("kinds", [{**KINDS, "inner.weight": "matrix"}, {"table.weight": "embedding"}])
def test_a_model_must_state_every_kind(kinds):
    with pytest.raises(ConfigError, match=r"inner\.weight"):
        named_by_kind(Tiny(kinds))


def test_only_matrices_of_the_hidden_layers_and_the_head_decay():
    parameters = {kind: nn.Parameter(torch.zeros(2, 2)) for kind in ("hidden", "embedding", "head", "vector")}
    groups = adamw_groups(parameters.items(), OptimConfig(lr=0.5, weight_decay=0.25))
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(parameters["hidden"]), id(parameters["head"])],
        [id(parameters["embedding"]), id(parameters["vector"])],
    ]
    assert all(group["lr"] == group["peak_lr"] == 0.5 for group in groups)


def test_an_empty_group_is_left_out():
    assert len(adamw_groups([("vector", nn.Parameter(torch.zeros(2)))], OptimConfig())) == 1
