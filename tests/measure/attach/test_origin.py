"""The line is named whose result is the first that is not finite, from one step's graph."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from flatout.measure.attach.recorder import CallRecorder, Graphs

HEAD = """
torch.manual_seed(0)
net = nn.Linear(4, 4)
mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
"""
LOSSES = {
    "exp": (
        "e = torch.exp(h * scale)",
        "h = net(x)\ne = torch.exp(h * scale)\nloss = (e / e.sum()).log().mean()",
    ),
    "entropy": (
        "e = h * (h.abs().add(1) * (1 - bad)).log()",
        "h = net(x)\ne = h * (h.abs().add(1) * (1 - bad)).log()\nf = e * 2\nloss = -f.sum()",
    ),
    "log of the loss": (
        "e = (h.abs().add(1) * (1 - bad)).log()",
        "h = net(x)\ne = (h.abs().add(1) * (1 - bad)).log()\nloss = -e.mean()",
    ),
    "division": ("e = h / (1 - bad)", "h = net(x)\ne = h / (1 - bad)\nloss = (e * e).mean()"),
    "attention": (
        "e = 1 / (h * (1 - bad))",
        "h = net(x)\n"
        "a = F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=mask)\n"
        "e = 1 / (h * (1 - bad))\nloss = (e * e).mean() + a.mean()",
    ),
}


@pytest.mark.parametrize("is_recorded_first", [True, False])
@pytest.mark.parametrize("kind", LOSSES)
def test_the_line_of_the_first_result_that_is_not_finite_is_known(
    kind, is_recorded_first, tmp_path
):
    line, loop = LOSSES[kind]
    path, graphs = tmp_path / "train.py", Graphs()
    path.write_text(loop)
    space = {"torch": torch, "nn": nn, "F": nn.functional}
    exec(HEAD, space)
    code = compile(loop, str(path), "exec")

    def step(bad=0.0):
        space.update(x=torch.rand(4, 4) + 1, bad=bad, scale=1000.0 * bad + 1)
        exec(code, space)
        graphs.mark(space["loss"])
        space["loss"].backward()

    step()
    for is_recorded in (is_recorded_first, not is_recorded_first):
        if is_recorded:
            with CallRecorder(lambda: "other"):
                step()
        else:
            assert graphs.origin.line is None
            step(bad=1.0)
    assert graphs.origin.line == (str(path), loop.splitlines().index(line) + 1)


DATA = {
    "a linear layer": ("h = net(x)", "h = net(x)\nloss = h.exp().mean()"),
    "targets": ("e = h - y", "h = net(x.nan_to_num())\ne = h - y\nloss = (e * y).mean()"),
    "a product": ("h = x @ net.weight", "h = x @ net.weight\nloss = h.mean()"),
}


@pytest.mark.parametrize("kind", DATA)
def test_values_of_the_data_that_are_not_finite_are_told_apart(kind, tmp_path):
    line, loop = DATA[kind]
    path, graphs = tmp_path / "train.py", Graphs()
    path.write_text(loop)
    space = {"torch": torch, "nn": nn}
    exec(HEAD, space)
    code = compile(loop, str(path), "exec")
    for bad in (1.0, 1.0, float("nan")):
        space.update(x=torch.rand(4, 4) * bad, y=torch.rand(4, 4) * bad)
        with CallRecorder(lambda: "other"):
            exec(code, space)
            graphs.mark(space["loss"])
            space["loss"].backward()
    assert graphs.origin.is_data
    if kind != "targets":  # only the product saves them
        assert graphs.origin.line == (str(path), loop.splitlines().index(line) + 1)


def test_without_a_loss_that_is_no_number_or_a_record_there_is_no_line():
    graphs, weights = Graphs(), torch.ones(2, requires_grad=True)
    for _ in range(3):
        graphs.mark((weights * 2).sum())
    assert graphs.origin.line is None
    graphs.mark((1 / (weights - 1)).sum())
    assert graphs.origin.line is None


def test_what_a_checkpoint_of_activations_computes_again_is_not_asked_for():
    graphs, weights, calls = Graphs(), torch.ones(2, requires_grad=True), []

    def block(x):
        calls.append(x)
        return (x * x).exp()

    loss = torch.utils.checkpoint.checkpoint(block, weights, use_reentrant=False).sum()
    graphs.mark(loss)
    assert len(calls) == 1
    loss.backward()
    assert weights.grad is not None


def test_weights_that_are_no_numbers_come_from_no_line():
    graphs, weights = Graphs(), torch.ones(2, requires_grad=True)
    for value in (1.0, 1.0, float("nan")):
        with torch.no_grad():
            weights.fill_(value)
        with CallRecorder(lambda: "other"):
            graphs.mark((torch.ones(3, 2) @ weights).exp().sum())
    assert graphs.origin.line is None


ROOTS = {
    "sqrt": ("d = (h * 0).sqrt()", True),
    "power": ("d = (h * 0) ** 0.5", True),
    "square": ("d = (h * 0) ** 2", False),
    "positive": ("d = (h * 0 + 1).sqrt()", False),
}


@pytest.mark.parametrize("kind", ROOTS)
def test_weights_that_are_lost_after_a_root_of_zero_come_from_it(kind, tmp_path):
    text, is_named = ROOTS[kind]
    path, graphs, weights = tmp_path / "train.py", Graphs(), torch.ones(2, requires_grad=True)
    loop = f"h = weights * 2\n{text}\nloss = (h + d).sum()"
    path.write_text(loop)
    space = {"weights": weights}
    code = compile(loop, str(path), "exec")
    for value in (1.0, float("nan"), float("nan")):
        with torch.no_grad():
            weights.fill_(value)
        with CallRecorder(lambda: "other"):
            exec(code, space)
            graphs.mark(space["loss"])
    assert graphs.origin.line == ((str(path), 2) if is_named else None)
