"""Marks surround what the training step calls, and change none of its results."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from flatout.assembly.recipe import Recipe
from flatout.measure.profile.marks import Marks, blocks


class Model(torch.nn.Linear):
    def forward(self, tokens_BT):
        return super().forward(tokens_BT).sum()


@pytest.fixture
def run():
    entered = []

    @contextmanager
    def grad_sync(model, is_last):
        assert isinstance(model, torch.nn.Module)  # not the marked one: DDP has its own methods
        entered.append(is_last)
        yield

    model = Model(4, 2)
    return SimpleNamespace(
        feed=iter([torch.ones(3, 4), torch.ones(3, 4)]),
        model=model,
        core=model,
        recipe=Recipe(grad_sync=grad_sync, zero_grad=lambda _: None),
        entered=entered,
    )


def step(run, seen, marks):
    marks.start_step(1)
    batch = next(run.feed)
    seen.append(marks.timer.current)
    for number in (1, 2):
        with run.recipe.grad_sync(run.model, number == 2):
            loss = run.model(batch)
            seen.append(marks.timer.current)
            loss.backward()
    seen.append(marks.timer.current)
    run.recipe.zero_grad(())
    seen.append(marks.timer.current)
    marks.end_step()


def test_phases_follow_the_calls_of_a_step(run):
    marks, seen = Marks(run), []
    marks.attach()
    step(run, seen, marks)
    assert seen == ["forward", "backward", "backward", "optimizer", "logging"]
    assert marks.timer.current is None
    assert run.entered == [False, True]
    assert marks.timer.calls == {
        "data": 1,
        "forward": 2,
        "backward": 2,
        "optimizer": 1,
        "logging": 1,
    }
    assert marks.inputs == marks.gradients == []  # kept for a profiler only


def test_addresses_are_kept_while_recording(run):
    marks = Marks(run)
    marks.attach()
    marks.recording = True
    step(run, [], marks)
    gradients = {one.grad.untyped_storage().data_ptr() for one in run.core.parameters()}
    assert {*marks.gradients[0]} == gradients
    assert [*marks.inputs[0].values()] == [3 * 4 * 4]
    assert len(marks.inputs) == 2


def test_views_of_one_block_count_once():
    whole = torch.ones(8, 4)
    assert blocks([whole, whole[2:], whole.T]) == {whole.data_ptr(): 128}
    assert blocks([torch.empty(0)]) == {}
