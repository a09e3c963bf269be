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
from flatout.training.run import run_training

pytestmark = pytest.mark.slow

QUICK = {"seconds": 0.02, "loss_steps": 8, "warmup_s": 0.05}


def trial(config, tmp_path, **limits):
    return measure(TrialSpec(config=config.to_dict(), folder=str(tmp_path), **QUICK | limits))


def test_its_losses_are_those_of_training(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(workload, "MIN_RUN_STEPS", 20)
    config = tiny_config(train__steps=20, log__every=1)
    found = trial(config, tmp_path / "trial")
    (tmp_path / "run").mkdir()
    losses = []

    class Watch:
        def on_record(self, record):
            if "train/loss" in record and len(losses) < 8:
                losses.append(record["train/loss"])

        def on_start(self, run): ...

        on_tick = on_event = on_end = lambda self, *_: None

    run_training(config, tmp_path / "run", observers=[Watch()])
    assert found.losses == losses


def test_the_schedule_does_not_depend_on_the_length_of_the_trial(tiny_config, tmp_path):
    short = trial(tiny_config(), tmp_path / "a")
    longer = trial(tiny_config(), tmp_path / "b", loss_steps=30)
    assert longer.losses[:8] == short.losses
    assert len(longer.losses) == 30


def test_a_trial_neither_saves_nor_evaluates(tiny_config, tmp_path):
    trial(tiny_config(train__eval_every=2, checkpoint__every_steps=2), tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    assert "val/loss" not in (tmp_path / "metrics.jsonl").read_text()


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
        "from flatout.assembly.recipe import Promise, Speedup\n"
        "def broken(model, mesh):\n"
        "    model._compiled_call_impl = lambda *a, **k: (_ for _ in ()).throw(RuntimeError('no "
        "compiler'))\n"
        "    return model\n"
        "SPEEDUP = Speedup(name='fallsback:SPEEDUP', saves='', promise=Promise.exact(), "
        "fills={'compilation': broken}, compiles=True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = trial(tiny_config(speedups="fallsback:SPEEDUP"), tmp_path / "run")
    sys.modules.pop("fallsback")
    assert found.status == "failed"
    assert "no compiler" in found.reason
    assert found.speedups == []


def test_a_rehearsal_evaluates_a_batch_and_saves_after_the_measured_steps(tiny_config, tmp_path):
    found = trial(tiny_config(), tmp_path / "run", rehearse=["evaluation", "save"])
    assert found.rehearsed == ["evaluation", "save"]
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
    assert found.losses == trial(tiny_config(), tmp_path / "plain").losses


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
