"""Whole runs on one GPU with the speedups that `auto` selects."""

import pytest
import torch

from flatout.assembly.choices import all_speedups
from flatout.errors import Stopped
from flatout.hardware.machine import probe
from flatout.inference.generate import Sampling, sample
from flatout.inference.load import load_run
from flatout.training.run import run_training

pytestmark = pytest.mark.gpu

DEVICES = [f"cuda:{number}" for number in range(min(torch.cuda.device_count(), 2))]
ESSENTIAL = pytest.mark.gpu_essential
LONG = {"data__seq_len": 256, "batch__tokens_per_step": 1024, "batch__rows_per_device": 2}
"""Sequences long enough that kernels sum gradients over several blocks; two micro-batches."""


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ESSENTIAL), *DEVICES])
def test_a_run_trains_evaluates_samples_stops_and_resumes(tiny_config, tmp_path, device, stop_at):
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
        run_training(config, tmp_path / "parts", observers=[stop_at(7)])
    parts = run_training(config, tmp_path / "parts")
    assert parts["steps"] == whole["steps"] == 12
    assert parts["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-2)
    assert whole["peak_gib"] > 0
    loaded = load_run(tmp_path / "whole")
    assert "".join(sample(loaded.model, loaded.tokenizer, "a run", Sampling(max_tokens=8)))


@ESSENTIAL
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_run_has_the_losses_of_a_cpu_run(tiny_config, tmp_path, precision):
    on_cpu = run_training(tiny_config(train__steps=20), tmp_path / "cpu")
    on_gpu = run_training(
        tiny_config(train__steps=20, train__device="cuda", train__precision=precision),
        tmp_path / "gpu",
    )
    assert on_gpu["val_loss"] == pytest.approx(on_cpu["val_loss"], rel=3e-2)


@ESSENTIAL
@pytest.mark.parametrize("kind", ["transformer", "eigenstate"])
def test_a_compiled_run_has_the_losses_of_an_eager_one(tiny_config, tmp_path, kind):
    settings = {"train__device": "cuda", "train__precision": "fp32", "model__kind": kind}
    eager = run_training(tiny_config(**settings, speedups="auto,-compile"), tmp_path / "eager")
    fast = run_training(tiny_config(**settings, speedups="auto,+compile"), tmp_path / "fast")
    assert fast["train_loss"] == pytest.approx(eager["train_loss"], rel=2e-3)


@ESSENTIAL
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("speedups", ["auto,-compile", "auto,+compile"])
def test_a_run_in_host_memory_has_the_losses_of_one_on_the_gpu(
    tiny_config, tmp_path, stop_at, optimizer, speedups
):
    settings = {
        "train__device": "cuda",
        "train__steps": 8,
        "optim__kind": optimizer,
        "speedups": speedups,
    }
    whole = run_training(tiny_config(**settings), tmp_path / "gpu")
    config = tiny_config(**settings, parallel__offload="cpu")
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "host", observers=[stop_at(4)])
    there = run_training(config, tmp_path / "host")
    assert there["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-2)


SETTINGS = {
    "eager": {"speedups": "auto,-compile", "model__dropout": 0.1},
    "compiled": {"speedups": "auto,+compile"},
    "documents": {"speedups": "auto,-compile", "data__document_mask": True},
    "flex": {"speedups": "auto,-compile,+flex-attention", "data__document_mask": True},
    "eigenstate": {"speedups": "auto,-compile", "model__kind": "eigenstate"},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[ESSENTIAL] * (name in {"eager", "compiled"})) for name in SETTINGS],
)
def test_a_deterministic_run_resumes_bit_for_bit(tiny_config, tmp_path, name, stop_at, losses):
    """Without train.deterministic, even two equal runs differ in their last bits."""
    config = tiny_config(
        train__device="cuda",
        train__precision="bf16",
        train__deterministic=True,
        train__steps=8,
        **LONG,
        **SETTINGS[name],
    )
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "parts", observers=[stop_at(5)])
    parts = run_training(config, tmp_path / "parts")
    assert parts["resumed_from"].endswith("step-5")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert parts["weights_sha256"] == whole["weights_sha256"]
    assert parts["val_loss"] == whole["val_loss"]


@ESSENTIAL
@pytest.mark.parametrize(
    "speedup",
    [speedup for speedup in all_speedups() if speedup.tolerance.kind == "exact"],
    ids=lambda s: s.name,
)
def test_an_exact_tolerance_holds_bit_for_bit_in_deterministic_runs(
    tiny_config, tmp_path, speedup, losses
):
    config = tiny_config(
        train__device="cuda",
        train__precision="auto",
        train__deterministic=True,
        train__steps=8,
        checkpoint__every_steps=4,
        **LONG,
    )
    why_not = speedup.reason_against(probe(), config)
    if why_not:
        pytest.skip(why_not)
    for name, speedups in {
        "without": speedup.needs,
        "with": (*speedup.needs, speedup.name),
    }.items():
        run_training(config.with_values({"speedups": list(speedups) or "none"}), tmp_path / name)
    assert len(losses(tmp_path / "with")) == 8
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


@pytest.mark.parametrize(("first", "second"), [("none", "fused-adamw"), ("fused-adamw", "none")])
def test_a_run_resumes_with_another_adamw(tiny_config, tmp_path, first, second):
    """One keeps its step count on the host, the other on the device."""
    settings = {"train__device": "cuda", "train__steps": 4}
    run_training(tiny_config(**settings, speedups=first), tmp_path / "first")
    longer = {**settings, "train__steps": 8}
    here, there = (
        run_training(
            tiny_config(**longer, speedups=speedups),
            tmp_path / speedups,
            resume=str(tmp_path / "first"),
        )
        for speedups in (first, second)
    )
    assert there["train_loss"] == pytest.approx(here["train_loss"], rel=1e-4)
