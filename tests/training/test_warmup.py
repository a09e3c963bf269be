"""A compile that fails is said once, and the run goes on as if it had never been asked for."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from flatout.assembly.parts import Decision
from flatout.ops import newton_schulz
from flatout.progress import SILENT
from flatout.training import evaluation
from flatout.training.evaluation import batch_shapes, score
from flatout.training.step import train_step
from flatout.training.warmup import warm_up


class Events:
    """A log that keeps its events, and what it reported."""

    def __init__(self):
        self.seen = []
        self.progress = Said()

    def event(self, kind, **fields):
        self.seen.append((kind, fields))

    def compiled(self, seconds):
        self.seen.append(("compiled", {}))


class Said:
    def __init__(self):
        self.lines = []

    def task(self, what, **_):
        return SILENT.task(what)

    def say(self, line):
        self.lines.append(line)


@pytest.fixture
def broken(build_run, tiny_config):
    """A run whose compiled model fails at its first call, as a missing compiler does."""
    run = build_run(tiny_config(model__dropout=0.1))
    run.decisions = [Decision("compile", True, "asked for")]

    def fail(*_):
        raise RuntimeError("no working compiler\nand a long story")

    run.core._compiled_call_impl = fail
    return run


def test_the_run_goes_on_eager_and_says_so_once(broken, build_run, tiny_config):
    events = Events()
    said = events.progress
    warm_up(broken, events)
    assert said.lines == ["Compiling failed, running eager: RuntimeError: no working compiler"]
    assert events.seen == [
        (
            "speedup",
            {
                "name": "compile",
                "on": False,
                "reason": said.lines[0][0].lower() + said.lines[0][1:],
            },
        )
    ]
    assert not broken.decisions[0].on
    plain = build_run(tiny_config(model__dropout=0.1))
    losses = []
    for run in (broken, plain):
        torch.manual_seed(5)
        losses.append(float(train_step(run, next(run.feed)).loss))
    assert losses[0] == losses[1]


def test_warming_up_leaves_generators_gradients_and_weights_alone(broken):
    state, python_state = torch.get_rng_state(), random.getstate()
    before = [p.detach().clone() for p in broken.core.parameters()]
    warm_up(broken, Events())
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert all(
        p.grad is None and torch.equal(p, b)
        for p, b in zip(broken.core.parameters(), before, strict=True)
    )


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own compiler makes objects of its functions
@pytest.mark.parametrize("works", ["blocks", "blocks and loss"])
def test_by_block_and_in_muon_too_a_failure_leaves_everything_plain(
    build_run, tiny_config, monkeypatch, works
):
    """The compiler fails at its first graph, or not before Muon's."""
    compiled = []

    def failing(graph, _inputs):
        compiled.append(graph)
        if works == "blocks" or any("baddbmm" in str(node.target) for node in graph.graph.nodes):
            raise RuntimeError("no working compiler")
        return graph.forward

    torch._dynamo.reset()
    newton_schulz._compiled_for_each_shape.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=failing))
    speedups = ["pretokenised", "compile-blocks", "compiled-muon"]
    run = build_run(tiny_config(speedups=speedups, optim__kind="muon", model__dropout=0.1))
    state = torch.get_rng_state()
    before = [p.detach().clone() for p in run.core.parameters()]
    events = Events()
    warm_up(run, events)
    newton_schulz._compiled_for_each_shape.cache_clear()
    assert [fields["name"] for kind, fields in events.seen if kind == "speedup"] == [
        "compiled-muon",
        "compile-blocks",
    ]
    assert not {d.name for d in run.decisions if d.on} & {"compile-blocks", "compiled-muon"}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        p.grad is None and torch.equal(p, b)
        for p, b in zip(run.core.parameters(), before, strict=True)
    )
    compiled.clear()
    plain = build_run(
        tiny_config(
            speedups=["pretokenised", "batched-muon"], optim__kind="muon", model__dropout=0.1
        )
    )
    for _ in range(2):
        losses = []
        for each in (run, plain):
            torch.manual_seed(5)
            losses.append(float(train_step(each, next(each.feed)).loss))
        assert losses[0] == losses[1]
    assert compiled == []


def test_the_gradients_that_go_are_the_optimizers_own(broken, monkeypatch):
    """Under fully_shard the model shows other tensors after an evaluation than those that are
    trained.
    """
    monkeypatch.setattr(broken.core, "parameters", lambda: iter(()))
    warm_up(broken, Events())
    assert broken.trained()
    assert all(parameter.grad is None for parameter in broken.trained())


def test_an_error_of_the_model_itself_is_not_blamed_on_compile(broken, monkeypatch):
    def fail(*_):
        raise ValueError("the model is wrong")

    monkeypatch.setattr(broken.core, "embed", fail)
    with pytest.raises(ValueError, match="the model is wrong"):
        warm_up(broken, Events())


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own compiler makes objects of its functions
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_graph_for_evaluation_is_compiled_where_something_is_evaluated(
    build_run, tiny_config, monkeypatch, evaluates
):
    training_or_not = []

    def noted(graph, _inputs):
        training_or_not.append(torch.is_grad_enabled())
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=noted))
    run = build_run(tiny_config(speedups=["pretokenised", "compile"]))
    assert batch_shapes(run) == [(4, 16)]
    if evaluates:
        warm_up(run, Events(), eval_shapes=batch_shapes(run))
        assert training_or_not == [True, False]
    else:
        warm_up(run, Events())
        assert training_or_not == [True]
    score(run, max_tokens=32)
    assert training_or_not == [True, False]


def test_without_validation_text_nothing_is_evaluated(build_run, tiny_config, monkeypatch):
    run = build_run(tiny_config())
    monkeypatch.setattr(evaluation, "members_of", lambda dataset: [])
    assert batch_shapes(run) == []


def test_a_run_that_compiles_nothing_is_not_warmed_up(build_run, tiny_config):
    run = build_run(tiny_config())
    called = []
    run.core.register_forward_pre_hook(lambda *_: called.append("forward"))
    events = Events()
    warm_up(run, events, eval_shapes=batch_shapes(run))
    assert (called, events.seen) == ([], [])
