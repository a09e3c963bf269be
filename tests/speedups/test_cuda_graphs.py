"""CUDA graphs are recorded around the whole model; no graph owns the memory of gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flatout.assembly.choices import select, speedup_named
from flatout.assembly.compiling import record_graphs
from flatout.assembly.parts import zero_in_place
from flatout.hardware.machine import Gpu, Machine
from flatout.training.run import run_training
from flatout.training.step import train_step

GPU = Machine("a CPU", 2, 8.0, (Gpu("an H200", 140.0, (9, 0), "1"),), "3.11")
SPEEDUP = speedup_named("cuda-graphs")


def test_why_not(tiny_config):
    assert "uses a CPU" in SPEEDUP.reason_against(GPU, tiny_config())
    assert SPEEDUP.reason_against(GPU, tiny_config(train__device="cuda")) is None
    assert "parallel.shard" in SPEEDUP.reason_against(
        GPU, tiny_config(train__device="cuda", parallel__shard=2)
    )
    assert "not been tested" in SPEEDUP.reason_against(
        GPU, tiny_config(train__device="cuda", parallel__replicate=2)
    )


def test_it_takes_the_place_of_compile(tiny_config):
    config = tiny_config(train__device="cuda", speedups="auto,+cuda-graphs")
    found = {one.name: one for one in select(config, GPU, device="cuda", minutes=60.0)}
    assert found["cuda-graphs"].on
    assert found["compile"].reason == "cuda-graphs, which was named, takes its place"


def test_each_call_of_the_model_marks_a_step_of_its_graphs(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append("step"))
    monkeypatch.setattr(torch, "compile", lambda call, **options: calls.append(options) or call)
    model = nn.Linear(2, 2)
    names = list(model.state_dict())
    record_graphs(model, SimpleNamespace(shard=1))
    for _ in range(2):
        model(torch.ones(1, 2))
    assert calls == [{"dynamic": False, "options": {"triton.cudagraphs": True}}, "step", "step"]
    assert list(model.state_dict()) == names


def test_gradients_keep_their_memory_and_accumulate(build_run, tiny_config):
    """As on a GPU, except for the graphs: the losses equal those with dropped gradients."""
    plain, kept = build_run(tiny_config()), build_run(tiny_config())
    kept.parts.zero_grad = zero_in_place
    zero_in_place(kept.core.parameters())
    places = [p.grad.data_ptr() for p in kept.core.parameters()]
    for _ in range(3):
        losses = [float(train_step(run, next(run.loader)).loss) for run in (plain, kept)]
        assert losses[0] == losses[1]
        assert [p.grad.data_ptr() for p in kept.core.parameters()] == places
        assert not any(p.grad.any() for p in kept.core.parameters())


def test_frozen_parameters_get_no_gradient():
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    zero_in_place([frozen])
    assert frozen.grad is None


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_equal_those_of_compile(tiny_config, tmp_path, precision):
    """Two micro-batches per step, and evaluation between steps, expose overwritten memory."""
    found = {}
    for speedups in ("auto,+compile", "auto,+cuda-graphs"):
        folder = tmp_path / str(len(found))
        changes = {
            "train__device": "cuda",
            "train__precision": precision,
            "train__eval_every": 3,
            "train__steps": 12,
        }
        summary = run_training(tiny_config(speedups=speedups, **changes), folder)
        found[speedups] = summary["train_loss"], summary["val_loss"]
        assert summary["recompiles"] == 0
        assert '"cuda_graphs_skipped": 0' in (folder / "events.jsonl").read_text()
    plain, recorded = found.values()
    assert recorded == pytest.approx(plain, rel=1e-4 if precision == "fp32" else 1e-2)
