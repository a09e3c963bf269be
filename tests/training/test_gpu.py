"""The whole way on one GPU, as `auto` takes it: what runs nowhere else."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from flatout.errors import Stopped
from flatout.generate import sample
from flatout.loading import load_run
from flatout.training.observers import Quiet
from flatout.training.start import run_training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICES = [f"cuda:{number}" for number in range(min(torch.cuda.device_count(), 2))]


class StopAt(Quiet):
    def __init__(self, step):
        self.step = step

    def on_tick(self, step, last_step):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("device", ["cuda", *DEVICES])
def test_train_evaluate_sample_stop_and_go_on(tiny_config, tmp_path, device):
    config = tiny_config(
        train__device=device,
        train__steps=12,
        train__eval_every=4,
        train__sample_every=5,
        speedups="auto",
        batch__rows_per_device="auto",
        optim__kind="muon",
    )
    whole = run_training(config, tmp_path / "whole", sample=lambda run: "")
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "parts", observers=[StopAt(7)])
    parts = run_training(config, tmp_path / "parts")
    assert parts["steps"] == whole["steps"] == 12
    assert parts["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-2)
    assert whole["peak_gib"] > 0
    loaded = load_run(tmp_path / "whole")
    assert "".join(sample(loaded.model, loaded.tokenizer, "a run", max_tokens=8))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_learns_what_the_cpu_learns(tiny_config, tmp_path, precision):
    on_cpu = run_training(tiny_config(train__steps=20), tmp_path / "cpu")
    on_gpu = run_training(tiny_config(train__steps=20, train__device="cuda", train__precision=precision), tmp_path / "gpu")
    assert on_gpu["val_loss"] == pytest.approx(on_cpu["val_loss"], rel=3e-2)


def test_a_compiled_run_gives_the_losses_of_an_eager_one(tiny_config, tmp_path):
    eager = run_training(tiny_config(train__device="cuda", train__precision="fp32"), tmp_path / "eager")
    fast = run_training(tiny_config(train__device="cuda", train__precision="fp32", speedups="auto,+compile"), tmp_path / "fast")
    assert fast["train_loss"] == pytest.approx(eager["train_loss"], rel=2e-3)


@pytest.mark.parametrize(("first", "second"), [("none", "fused-adamw"), ("fused-adamw", "none")])
def test_another_way_to_carry_out_adamw_goes_on(tiny_config, tmp_path, first, second):
    """The one keeps its step on the host, the other on the device."""
    settings = {"train__device": "cuda", "train__steps": 4}
    run_training(tiny_config(**settings, speedups=first), tmp_path / "first")
    longer = {**settings, "train__steps": 8}
    here, there = (
        run_training(tiny_config(**longer, speedups=speedups), tmp_path / speedups, resume=str(tmp_path / "first")) for speedups in (first, second)
    )
    assert there["train_loss"] == pytest.approx(here["train_loss"], rel=1e-4)
