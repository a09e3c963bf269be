"""The compiler gets the option with the model, for forward and backward, and for nothing else."""

from __future__ import annotations

import threading
import uuid
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._inductor import graph

from flatout.assembly.selection import select, speedup_named
from flatout.hardware import Gpu, Machine
from flatout.speedups.coordinate_descent import OPTION

pytestmark = pytest.mark.slow

GPU = Machine("a CPU", 2, 8.0, (Gpu("an H200", 140.0, (9, 0), "1"),), "3.11")
MESH = SimpleNamespace(shard=1, world_size=1)
SPEEDUP = speedup_named("coordinate-descent")


@pytest.fixture
def compile_options(build_run, tiny_config, monkeypatch):
    """The options that torch.compile gets after the transforms of the named speedups."""

    def after(*names):
        model, given = build_run(tiny_config()).core, []
        monkeypatch.setattr(torch, "compile", lambda call, **options: given.append(options) or call)
        for name in names:
            model = speedup_named(name).transform.apply(model, MESH)
        return given

    return after


def test_torch_has_the_option():
    assert OPTION in torch._inductor.list_options()


def test_every_speedup_that_compiles_the_model_passes_the_option(compile_options):
    assert compile_options("compile") == [{"dynamic": False, "options": None}]
    assert compile_options("coordinate-descent", "compile") == [
        {"dynamic": False, "options": {OPTION: True}}
    ]
    assert compile_options("coordinate-descent", "compile", "cuda-graphs")[-1]["options"] == {
        OPTION: True,
        "triton.cudagraphs": True,
    }
    by_block = compile_options("coordinate-descent", "compile-blocks")
    assert len(by_block) == 3, "two blocks and the loss"
    assert all(options == {"dynamic": False, "options": {OPTION: True}} for options in by_block)


def test_a_compiler_without_the_option_is_not_given_it(compile_options, monkeypatch):
    monkeypatch.setattr(torch._inductor, "list_options", list)
    assert compile_options("coordinate-descent", "compile") == [{"dynamic": False, "options": None}]


def test_why_not(tiny_config):
    assert "generates C++" in SPEEDUP.reason_against(GPU, tiny_config())
    assert SPEEDUP.reason_against(GPU, tiny_config(train__device="cuda")) is None
    assert "train.deterministic" in SPEEDUP.reason_against(
        GPU, tiny_config(train__device="cuda", train__deterministic=True)
    )
    decision = next(
        d
        for d in select(
            tiny_config(train__device="cuda", speedups="auto"), GPU, device="cuda", minutes=600
        )
        if d.name == SPEEDUP.name
    )
    assert not decision.on


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own compiler makes objects of its functions
def test_only_forward_and_backward_are_tuned(monkeypatch):
    """Backward runs in its own thread, as on a GPU.

    Settings of the process do not apply there in every version of torch.
    """
    seen, run = [], graph.GraphLowering.run

    def watched(lowering, *inputs):
        seen.append(torch._inductor.config.coordinate_descent_tuning)
        return run(lowering, *inputs)

    class Model(nn.Linear):
        compiler_options: ClassVar = {}
        blocks = ()

        def forward(self, x):
            return super().forward(x).relu() * new  # a graph that no cache holds

    new = uuid.uuid4().int % 10**9 / 10**9
    monkeypatch.setattr(graph.GraphLowering, "run", watched)
    model = Model(4, 4)
    for name in ("coordinate-descent", "compile"):
        speedup_named(name).transform.apply(model, MESH)
    loss = model(torch.ones(2, 4)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert model.weight.grad is not None
    assert seen == [True, True]
    assert not torch._inductor.config.coordinate_descent_tuning
