"""A failed compilation is reported once, and the run continues uncompiled."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from flatout.assembly.choices import Decision
from flatout.assembly.compiling import compile_cost
from flatout.progress import SILENT
from flatout.training.evaluation import batch_shapes, score
from flatout.training.signals import StopRequests, WorkInterrupted
from flatout.training.step import train_step
from flatout.training.warmup import warm_up

pytestmark = pytest.mark.slow

# torch's compiler instantiates its own deprecated functions
COMPILES = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Events:
    """A log that records its events."""

    def __init__(self, progress=SILENT):
        self.seen = []
        self.progress = progress

    def event(self, kind, **fields):
        self.seen.append((kind, fields))

    def compiled(self, seconds):
        self.seen.append(("compiled", {}))


@pytest.fixture
def broken(build_run, tiny_config):
    """Return a run whose compiled model fails at its first call, as if no compiler existed."""
    run = build_run(tiny_config(model__dropout=0.1))
    run.decisions = [Decision("compile", True, "requested")]

    def fail(*_):
        raise RuntimeError("no working compiler\nand a long story")

    run.core._compiled_call_impl = fail
    return run


def test_the_run_continues_eager_and_reports_it_once(broken, build_run, tiny_config, messages):
    events = Events(messages)
    warm_up(broken, events)
    assert messages.lines == ["Compiling failed, running eager: RuntimeError: no working compiler"]
    reason = messages.lines[0][0].lower() + messages.lines[0][1:]
    assert events.seen == [("speedup", {"name": "compile", "on": False, "reason": reason})]
    assert not broken.decisions[0].on
    plain = build_run(tiny_config(model__dropout=0.1))
    losses = []
    for run in (broken, plain):
        torch.manual_seed(5)
        losses.append(float(train_step(run, next(run.loader)).loss))
    assert losses[0] == losses[1]


def test_warming_up_changes_no_gradient_or_weight(broken):
    before = [p.detach().clone() for p in broken.core.parameters()]
    warm_up(broken, Events())
    assert all(
        p.grad is None and torch.equal(p, b)
        for p, b in zip(broken.core.parameters(), before, strict=True)
    )


def test_warming_up_changes_no_buffer(broken):
    """A resumed run warms up too, and would not continue as the first one."""
    passes = torch.zeros(())
    broken.core.register_buffer("passes", passes)
    seen = []

    def count(*_):
        passes.add_(1)
        seen.append(float(passes))

    broken.core.register_forward_pre_hook(count)
    warm_up(broken, Events())
    assert seen == [1.0, 2.0]
    assert float(broken.core.passes) == 0.0


@pytest.mark.parametrize("shard", [1, 2])
def test_a_stop_request_ends_the_warm_up_and_changes_nothing(broken, monkeypatch, shard):
    """Sharded passes communicate, so that they are not interrupted."""
    events, begun = Events(), []

    def compiling(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        begun.append(1)
        raise RuntimeError("a process of the compiler was ended by the signal too")

    broken.core._compiled_call_impl = compiling
    monkeypatch.setattr(
        broken, "mesh", replace(broken.mesh, device_mesh=[None, object()][shard - 1])
    )
    with StopRequests() as stop, pytest.raises(WorkInterrupted):
        warm_up(broken, events, stop=stop)
    assert len(begun) == shard - 1
    assert events.seen == [], "the failure is not the compiler's"
    assert broken.decisions[0].on
    assert broken.core.training


def test_a_stop_request_ends_the_warm_up_of_sharded_ranks_after_one_pass(broken, monkeypatch):
    """Compiling one shape may take a minute, and a run with length buckets has several."""
    calls, forward = [], type(broken.core)._call_impl

    def compiled(*arguments):
        calls.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
        return forward(broken.core, *arguments)

    broken.core._compiled_call_impl = compiled
    monkeypatch.setattr(broken, "mesh", replace(broken.mesh, device_mesh=object()))
    with StopRequests() as stop, pytest.raises(WorkInterrupted):
        warm_up(broken, Events(), eval_shapes=batch_shapes(broken), stop=stop)
    assert len(calls) == 1


@COMPILES
@pytest.mark.parametrize("works", ["nothing", "blocks"])
def test_a_failure_in_a_block_or_in_the_loss_leaves_everything_uncompiled(
    build_run, tiny_config, monkeypatch, works
):
    """The compiler fails at its first graph, or only at that of the loss."""
    compiled = []

    def failing(graph, _inputs):
        compiled.append(graph)
        if works == "nothing" or any(
            "cross_entropy" in str(node.target) for node in graph.graph.nodes
        ):
            raise RuntimeError("no working compiler")
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=failing))
    speedups = ["pretokenised", "compile-blocks"]
    run = build_run(tiny_config(speedups=speedups, optim__kind="muon", model__dropout=0.1))
    before = [p.detach().clone() for p in run.core.parameters()]
    events = Events()
    warm_up(run, events)
    assert [fields["name"] for kind, fields in events.seen if kind == "speedup"] == [
        "compile-blocks"
    ]
    assert "compile-blocks" not in {d.name for d in run.decisions if d.on}
    assert all(
        p.grad is None and torch.equal(p, b)
        for p, b in zip(run.core.parameters(), before, strict=True)
    )
    compiled.clear()
    plain = build_run(
        tiny_config(speedups=["pretokenised"], optim__kind="muon", model__dropout=0.1)
    )
    for _ in range(2):
        losses = []
        for each in (run, plain):
            torch.manual_seed(5)
            losses.append(float(train_step(each, next(each.loader)).loss))
        assert losses[0] == losses[1]
    assert compiled == []


def test_the_optimizers_own_gradients_are_cleared(broken, monkeypatch):
    """Under fully_shard, the model's tensors may differ from the trained ones."""
    monkeypatch.setattr(broken.core, "parameters", lambda: iter(()))
    warm_up(broken, Events())
    assert broken.trained()
    assert all(parameter.grad is None for parameter in broken.trained())


def test_an_error_of_the_model_is_not_blamed_on_compile(broken, monkeypatch):
    def fail(*_):
        raise ValueError("the model is wrong")

    monkeypatch.setattr(broken.core, "embed", fail)
    with pytest.raises(ValueError, match="the model is wrong"):
        warm_up(broken, Events())


@pytest.mark.quick_cases("True")
@COMPILES
@pytest.mark.parametrize("evaluates", [True, False])
def test_evaluation_is_compiled_only_if_something_is_evaluated(
    build_run, tiny_config, monkeypatch, tmp_path, evaluates
):
    grad_enabled = []

    def noted(graph, _inputs):
        grad_enabled.append(torch.is_grad_enabled())
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=noted))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    run = build_run(tiny_config(speedups=["pretokenised", "compile"]))
    assert batch_shapes(run) == [(4, 16)]
    assert compile_cost(run.config, 0.5) == 1
    if evaluates:
        warm_up(run, Events(), eval_shapes=batch_shapes(run))
        assert grad_enabled == [True, False]
        assert compile_cost(run.config, 0.5) < 1
    else:
        warm_up(run, Events())
        assert grad_enabled == [True]
    score(run, max_tokens=32)
    assert grad_enabled == [True, False]


def test_a_run_that_compiles_nothing_is_not_warmed_up(build_run, tiny_config):
    run = build_run(tiny_config())
    called = []
    run.core.register_forward_pre_hook(lambda *_: called.append("forward"))
    events = Events()
    warm_up(run, events, eval_shapes=batch_shapes(run))
    assert (called, events.seen) == ([], [])


@pytest.mark.thorough
def test_the_compiler_picks_the_instructions_that_its_own_tests_find():
    code = """
import sys
from contextlib import nullcontext
import torch
from flatout.assembly.compiling import known_processor
with known_processor() if sys.argv[1:] else nullcontext():
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    print(pick_vec_isa(), pick_vec_isa().build_arch_flags())
    print(torch._inductor.config.cpp.vec_isa_ok)
"""
    known, tested = (
        subprocess.check_output([sys.executable, "-c", code, *words], text=True).splitlines()
        for words in (["known"], [])
    )
    assert known[0] == tested[0]
    is_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    assert (known[1], tested[1]) == (str(is_x86 or None), "None")
