"""torch's optimizers on split weights, with the Triton kernels in the interpreter."""

import copy

import pytest
import torch
from split_update_cases import NUMBERS, advance, assert_same_bits, copied, lists, random_inputs
from torch import nn

from flatout.models.split_weights import SplitTensor, decay_and_add, whole
from flatout.ops import split_update, triton_kernels
from flatout.ops.split import join, split
from flatout.optimizers.adamw import fused

pytest.importorskip("triton", reason="the package triton is not installed")


class Training:
    """Parameters, some of them split, in groups with and without decay, under AdamW."""

    SHAPES = ((24, 32), (7, 9), (33, 5), (16,), (3,))

    def __init__(self, *, lr=0.01):
        weights = [
            join(*split(random_inputs(shape, 40 + i))) for i, shape in enumerate(self.SHAPES)
        ]
        weights[2] = weights[2].T.contiguous().T
        self.parameters = [
            nn.Parameter(SplitTensor(*split(w)) if w.dim() == 2 else w.clone()) for w in weights
        ]
        groups = [
            {"params": self.parameters[0:2], "weight_decay": 0.1},
            {"params": self.parameters[2:], "weight_decay": 0.0},
        ]
        self.optimizer = fused(groups, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8})

    def step(self, numbers):
        for number in numbers:
            for index, parameter in enumerate(self.parameters):
                parameter.grad = torch.empty_like(whole(parameter.detach())).copy_(
                    random_inputs(parameter.shape, 1_000 + 10 * number + index)
                )
            self.optimizer.step()

    def state(self):
        kept = [tensor for p in self.parameters for tensor in self.optimizer.state[p].values()]
        return [whole(p.detach()) for p in self.parameters] + kept


def test_torchs_adamw_uses_the_kernel_and_agrees_up_to_rounding(interpreted, monkeypatch):
    """Weights are decayed or not, transposed, of odd sizes, or small; torch updates plain ones."""
    by_kernel = Training()
    by_kernel.step(range(5))
    assert {key for state in by_kernel.optimizer.state.values() for key in state} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    monkeypatch.setattr(triton_kernels, "run_on", lambda tensor: False)
    by_torch = Training()
    by_torch.step(range(5))
    for actual, expected in zip(by_kernel.state(), by_torch.state(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
    assert all(
        torch.equal(one, other)
        for one, other in zip(by_kernel.parameters[3:], by_torch.parameters[3:], strict=True)
    )
    assert not all(
        torch.equal(one, other)
        for one, other in zip(by_kernel.state(), by_torch.state(), strict=True)
    )


def test_torchs_adamw_with_the_kernel_equals_the_reference(interpreted):
    trained = Training()
    expected = [
        [*split(whole(p.detach())), torch.zeros(p.shape), torch.zeros(p.shape)]
        for p in trained.parameters[:3]
    ]
    for number in range(4):
        trained.step([number])
        for index, (high, low, mean, square) in enumerate(expected):
            gradient, decay = trained.parameters[index].grad, 0.1 if index < 2 else 0.0
            split_update.adamw_reference(
                [high],
                [low],
                [gradient],
                [mean],
                [square],
                [torch.tensor(number + 1.0)],
                **NUMBERS | {"weight_decay": decay},
            )
    for parameter, (high, low, mean, square) in zip(trained.parameters, expected, strict=False):
        state = trained.optimizer.state[parameter]
        assert_same_bits(
            [[parameter.high, parameter.low, state["exp_avg"], state["exp_avg_sq"]]],
            [[high, low, mean, square]],
        )


def test_the_layout_of_a_gradient_does_not_matter(interpreted):
    columns = lists([(24, 10)])
    advance(columns[5])
    expected = copied(columns)
    split_update.adamw_reference(*expected, **NUMBERS)
    columns[2] = [columns[2][0].T.contiguous().T]
    split_update.adamw(*columns, **NUMBERS)
    assert_same_bits(columns, expected)


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_training_continues_between_torchs_adamw_and_the_kernel(interpreted, monkeypatch, first):
    runs = []
    for second in (first, not first):
        trained, again = Training(), Training(lr=0.3)
        monkeypatch.setattr(triton_kernels, "run_on", lambda tensor: first)
        trained.step(range(3))
        again.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
        for old, new in zip(trained.parameters, again.parameters, strict=True):
            new.data.copy_(old.data)
        monkeypatch.setattr(triton_kernels, "run_on", lambda tensor, second=second: second)
        again.step(range(3, 6))
        runs.append(again.state())
    for actual, expected in zip(*runs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(interpreted):
    straight, stopped, again = Training(), Training(), Training()
    straight.step(range(6))
    stopped.step(range(3))
    again.optimizer.load_state_dict(stopped.optimizer.state_dict())
    for old, new in zip(stopped.parameters, again.parameters, strict=True):
        new.data.copy_(old.data)
    again.step(range(3, 6))
    assert_same_bits([again.state()], [straight.state()])


@pytest.mark.parametrize("by_kernel", [True, False])
def test_decay_and_add_of_split_and_plain_weights_matches_fp32(interpreted, monkeypatch, by_kernel):
    """The weights are rows, a transposed matrix, columns with gaps, and a plain one."""
    monkeypatch.setattr(triton_kernels, "run_on", lambda tensor: by_kernel)
    start = [
        join(*split(random_inputs(shape, 60 + i)))
        for i, shape in enumerate([(12, 20), (9, 8), (6, 6), (4, 5)])
    ]
    parts = [SplitTensor(*split(w)) for w in start[:3]] + [start[3].clone()]
    views = [lambda w: w[4:12], lambda w: w.T, lambda w: w[:, 1:4], lambda w: w]
    steps = [
        random_inputs(view(w).shape, 80 + i)
        for i, (view, w) in enumerate(zip(views, start, strict=True))
    ]
    decay_and_add(
        [view(w) for view, w in zip(views, parts, strict=True)], steps, kept=0.99, alpha=-0.3
    )
    for view, weight, actual, step in zip(views, start, parts, steps, strict=True):
        view(weight).mul_(0.99).add_(step, alpha=-0.3)
        torch.testing.assert_close(whole(actual), weight, rtol=1e-6, atol=1e-7)
        if not by_kernel:
            assert torch.equal(
                whole(actual), join(*split(weight)) if isinstance(actual, SplitTensor) else weight
            )
