"""What a script's calls in torch show, line by line."""

from __future__ import annotations

import sys

import pytest
import torch

from flatout.measure.scripts.recorder import CallRecorder, Graphs, own_lines
from flatout.measure.steps.lines import LineTotals, line_of, user_frame


@pytest.fixture
def weights():
    """Return a matrix with gradients."""
    return torch.nn.Parameter(torch.randn(64, 64))


def test_lines_that_train_are_told_from_others(weights):
    recorder, (file, here) = CallRecorder(lambda: "other"), user_frame(sys._getframe())
    with recorder:
        loss = (weights @ weights).sum()
        copy = weights.detach().clone()
        shown = str(weights.abs().max())
        recorder.note_backward(loss)
    lines = [(file, here + 2), (file, here + 3), (file, here + 4)]
    assert [line in recorder.trains for line in lines] == [True, False, False]
    sampled = LineTotals()
    for line in lines * 3:
        sampled.add("python", line, 0.1)
    sampled.callers = {lines[1]: (file, here), lines[2]: (file, 1)}
    found, training_s = own_lines(sampled, 1, recorder, [(file, 1)])
    assert [*found.seconds["own"]] == lines[1:]
    assert [*found.callers] == [lines[1]]
    assert training_s == pytest.approx(0.3)
    del copy, shown


def test_attention_float64_and_the_loss_are_seen(weights):
    recorder = CallRecorder(lambda: "forward")
    with recorder:
        torch.softmax((weights @ weights)[None], dim=-1)
        loss = torch.nn.functional.cross_entropy(weights, torch.zeros(64, dtype=torch.long))
        weights.double().sum()
    assert {"softmax", "float64"} <= recorder.found.counts.keys()
    assert (recorder.classes, recorder.loss()) == (64, loss)


def test_kept_outputs_keep_their_graph_without_the_loss(weights):
    graphs, outputs = Graphs(), []
    for _ in range(10):
        output = (weights @ weights).relu()
        loss = output.square().mean()
        graphs.mark(loss)
        loss.backward()
        outputs.append(output)
    assert graphs.kept() == 1.0
    name, line = graphs.keeper(sys._getframe())
    assert (name, line_of(*line)) == ("outputs", "outputs.append(output)")


@pytest.mark.parametrize("keeps", [True, False])
def test_kept_graphs_are_counted_and_their_variable_is_named(weights, keeps):
    graphs, losses, total = Graphs(), [], 0.0
    for _ in range(10):
        loss = (weights @ weights).sum()
        graphs.mark(loss)
        loss.backward()
        losses.append(loss if keeps else loss.item())
        total += loss.item()
    assert graphs.kept() == (1.0 if keeps else 0.0)
    name, line = graphs.keeper(sys._getframe()) or (None, None)
    assert name == ("losses" if keeps else None)
    assert line is None or line_of(*line).startswith("losses.append(")
