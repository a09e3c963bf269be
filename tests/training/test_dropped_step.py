"""A signal during an optimiser step drops the step. The resumed run repeats it exactly."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from warm import run_ranks

from flatout.errors import Stopped
from flatout.models.transformer import Transformer
from flatout.training.checkpoint import catalog
from flatout.training.metrics.observers import Quiet
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_exit_code

pytestmark = pytest.mark.slow

MICRO_BATCHES = 8


@pytest.fixture
def signal_in(monkeypatch):
    """Return a function that signals this process in a micro-batch, counted over the run.

    It returns the list of micro-batches that ran.
    """
    ran = []

    def send(number, kind=signal.SIGTERM):
        forward = Transformer.forward

        def counted(self, *arguments):
            if self.training and torch.is_grad_enabled():
                ran.append(len(ran) + 1)
                if len(ran) == number:
                    os.kill(os.getpid(), kind)
            return forward(self, *arguments)

        monkeypatch.setattr(Transformer, "forward", counted)
        return ran

    return send


@pytest.mark.quick_cases("2-plain", "19-prefetching")
@pytest.mark.parametrize("speedups", ["auto,-compile", "none"], ids=["prefetching", "plain"])
@pytest.mark.parametrize("micro_batch", [2, 2 * MICRO_BATCHES + 3])
def test_the_rest_of_the_step_is_dropped_and_the_run_resumes_exactly(
    tiny_config, tmp_path, monkeypatch, signal_in, micro_batch, speedups
):
    config = tiny_config(
        model__dropout=0.2, batch__rows_per_device=1, speedups=speedups, train__eval_every=2
    )
    whole = run_training(config, tmp_path / "whole")
    ran = signal_in(micro_batch)
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run")
    assert ran == list(range(1, micro_batch + 1)), "no micro-batch starts after the signal"
    assert catalog.steps(tmp_path / "run")[-1] == micro_batch // MICRO_BATCHES
    assert read_exit_code(tmp_path / "run") == 75
    monkeypatch.undo()
    resumed = run_training(config, tmp_path / "run")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert (resumed["steps"], resumed["tokens"], resumed["val_loss"]) == (
        whole["steps"],
        whole["tokens"],
        whole["val_loss"],
    )


def test_the_final_evaluation_is_dropped_and_repeated_by_the_next_start(
    tiny_config, tmp_path, monkeypatch
):
    config = tiny_config(batch__rows_per_device=1)
    whole = run_training(config, tmp_path / "whole")
    forward, scored = Transformer.forward, []

    def counted(self, *arguments):
        if not self.training:
            scored.append(1)
            if len(scored) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Transformer, "forward", counted)
        with pytest.raises(Stopped, match="Stopped at step 6 of 6, and saved"):
            run_training(config, tmp_path / "run")
    assert len(scored) == 2
    summary = run_training(config, tmp_path / "run")
    assert [summary[key] for key in ("steps", "train_loss", "val_loss", "best_step")] == [
        whole[key] for key in ("steps", "train_loss", "val_loss", "best_step")
    ]


class ArmedAt(Quiet):
    """Notes that a step has been reached."""

    def __init__(self, step):
        self.step, self.armed = step, False

    def on_tick(self, step, last_step):
        self.armed |= step == self.step


@pytest.mark.parametrize("patience", [0, 1])
def test_an_evaluation_is_dropped_and_repeated_by_the_next_start(
    tiny_config, tmp_path, monkeypatch, records, patience
):
    """Before the evaluation at step 4, patience seems to have run out at step 2."""
    config = tiny_config(batch__rows_per_device=1, train__eval_every=2, train__patience=patience)
    whole = run_training(config, tmp_path / "whole")
    assert whole["best_step"] == 6
    at, forward, scored = ArmedAt(4), Transformer.forward, []

    def counted(self, *arguments):
        if at.armed and not self.training:
            scored.append(1)
            if len(scored) == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
        return forward(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Transformer, "forward", counted)
        for _ in range(2):
            scored.clear()
            with pytest.raises(Stopped, match=r"step 4 of 6, and saved .* s after SIGUSR1"):
                run_training(config, tmp_path / "run", observers=[at])
            assert len(scored) == 2
    assert read_exit_code(tmp_path / "run") == 75
    resumed = run_training(config, tmp_path / "run")
    keys = ("steps", "val_loss", "best_val_loss", "best_step", "weights_sha256", "stopped_early")
    assert [resumed[key] for key in keys] == [whole[key] for key in keys]

    def losses(run):
        return [(r["step"], r.get("train/loss"), r.get("val/loss")) for r in records(run)]

    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_sample_is_interrupted_and_the_run_saves(tiny_config, tmp_path, events):
    def endless(run):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the sample went on")

    config = tiny_config(train__sample_every=2)
    with pytest.raises(Stopped, match="Stopped at step 2 of 6"):
        run_training(config, tmp_path / "run", sample=endless)
    assert events(tmp_path / "run", "sample") == []
    (stop,) = events(tmp_path / "run", "stop")
    assert stop["cause"] == "SIGTERM"
    assert stop["saved_after_s"] >= 0


def test_two_processes_drop_the_step_together(tiny, tiny_set, tmp_path):
    """Only the second gets the signal, in its first micro-batch; both stop before the third."""
    values = json.dumps(
        {
            **tiny,
            "data.path": str(tiny_set),
            "model.dropout": 0.2,
            "batch.rows_per_device": 1,
            "speedups": "auto,-compile",
        }
    )
    done = run_ranks([Path(__file__).with_name("drop_worker.py"), tmp_path, values])
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [each["ran"] for each in found] == [2, 2]
    assert catalog.steps(tmp_path / "run") == [0, 6]
    assert all(each["resumed"] == each["whole"] for each in found)
