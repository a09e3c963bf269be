"""A trial in this process: its run is the one that training would build."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from flatout.errors import RunFailed
from flatout.measure.experiments import trial as workload
from flatout.measure.experiments.records import TrialSpec
from flatout.measure.experiments.trial import measure
from flatout.storage.json_io import read_lines
from flatout.training.run import run_training

pytestmark = pytest.mark.slow

QUICK = {"seconds": 0.02, "loss_steps": 8, "warmup_s": 0.05}


def trial(config, tmp_path, **limits):
    return measure(TrialSpec(config=config.to_dict(), folder=str(tmp_path), **QUICK | limits))


def test_its_losses_are_those_of_training(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(train__steps=40, log__every=1)
    monkeypatch.setattr(workload, "MIN_RUN_STEPS", 40)
    short = trial(config, tmp_path / "short")
    longer = trial(config, tmp_path / "longer", loss_steps=30)
    run_training(config, tmp_path / "run")
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert short.losses == losses[:8]
    assert longer.losses == losses[:30], "whatever the length of the trial"


def test_a_trial_saves_and_evaluates_only_to_rehearse(tiny_config, tmp_path):
    config, wanted = (
        tiny_config(train__eval_every=2, checkpoint__every_steps=2),
        ["evaluation", "save"],
    )
    plain = trial(config, tmp_path / "plain")
    assert not (tmp_path / "plain" / "checkpoints").exists()
    assert "val/loss" not in (tmp_path / "plain" / "metrics.jsonl").read_text()
    found = trial(config, tmp_path / "rehearsed", rehearse=wanted)
    assert found.rehearsed == wanted
    assert len(list((tmp_path / "rehearsed" / "checkpoints").glob("step-*"))) == 1
    assert found.losses == plain.losses, "it follows the measured steps"


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own compiler makes objects of its functions
def test_no_graph_is_compiled_for_skipped_evaluations(tiny_config, tmp_path, monkeypatch):
    for_training = []

    def noted(graph, _inputs):
        for_training.append(torch.is_grad_enabled())
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=noted))
    trial(tiny_config(speedups=["pretokenised", "compile"]), tmp_path)
    assert for_training == [True]


def test_an_automatic_micro_batch_is_resolved_in_the_trial(tiny_config, tmp_path):
    batch = {"batch__tokens_per_step": 16 * 16, "batch__rows_per_device": "auto"}
    plain = trial(tiny_config(**batch, speedups="none"), tmp_path / "a")
    fast = trial(tiny_config(**batch, speedups="micro-batch"), tmp_path / "b")
    assert (plain.rows_per_device, plain.accumulate) == (8, 2)
    assert (fast.rows_per_device, fast.accumulate) == (16, 1)


def test_a_run_that_diverges_is_reported(tiny_config, tmp_path):
    with pytest.raises(RunFailed, match="diverged"):
        trial(tiny_config(optim__lr=1e30, schedule__warmup=0, log__every=1000), tmp_path)


def test_a_speedup_that_fell_back_fails_its_trial(tiny_config, tmp_path, monkeypatch):
    (tmp_path / "fallsback.py").write_text(
        "from flatout.assembly.recipe import Tolerance, Speedup\n"
        "def broken(model, mesh):\n"
        "    model._compiled_call_impl = lambda *a, **k: (_ for _ in ()).throw(RuntimeError('no "
        "compiler'))\n"
        "    return model\n"
        "SPEEDUP = Speedup(name='fallsback:SPEEDUP', saves='', tolerance=Tolerance.exact(), "
        "fills={'compilation': broken}, compiles=True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = trial(tiny_config(speedups="fallsback:SPEEDUP"), tmp_path / "run")
    sys.modules.pop("fallsback")
    assert found.status == "failed"
    assert "no compiler" in found.reason
    assert found.speedups == []


def test_a_rehearsal_without_disk_or_validation_text_does_what_it_can(
    tiny_config, tmp_path, monkeypatch, write_tiny
):
    full = type("Usage", (), {"free": 0})
    monkeypatch.setattr(workload.shutil, "disk_usage", lambda path: full)
    found = trial(tiny_config(), tmp_path / "run", rehearse=["evaluation", "save"])
    assert found.rehearsed == ["evaluation"]
    data = write_tiny(tmp_path / "data", num_documents=6)  # the eighth would be for validation
    found = trial(tiny_config(data__path=str(data)), tmp_path / "b", rehearse=["evaluation"])
    assert found.rehearsed == []
