"""The run is on the CPU although the machine has a GPU."""

from __future__ import annotations

from flatout.hardware import CUDA_TORCH
from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when a GPU is there and not used."""
    host, machine = evidence.host, evidence.machine
    if evidence.device != "cpu":
        return None
    names = [gpu.name for gpu in machine.gpus] if machine is not None else []
    if not names and not host.sees_gpu:
        return None
    gpu = names[0] if names else "a GPU that torch can use"
    reason = host.no_gpu_because or "the model and its batches are on the CPU"
    if reason == "requested":
        reason = "train.device=cpu asks for it"
    return Finding(
        verdict=f"The run is on the CPU, and this machine has {gpu}: {reason}.",
        harm="slows",
        figures={"torch": host.torch_version, "torch_cuda": host.torch_cuda},
        fixes=(_fix(evidence),),
    )


def _fix(evidence: Evidence) -> Fix:
    host = evidence.host
    if host.sees_gpu:
        if evidence.config is None:
            return Fix(text='Move the model and every batch to the GPU: `.to("cuda")`.')
        return Fix(
            text="Remove train.device=cpu.",
            overrides={"train.device": "auto"},
            same_result=False,
        )
    if host.torch_version is not None and host.torch_cuda is None:
        return Fix(text=f"Install a torch for CUDA: `{CUDA_TORCH}`.")
    if "CUDA_VISIBLE_DEVICES" in (host.environment or {}):
        return Fix(text="Unset CUDA_VISIBLE_DEVICES, which hides the GPU from torch.")
    return Fix(text="Check that the driver works (`nvidia-smi`) and suits this torch.")


FINDING = FindingRule(name="cpu-by-mistake", look=look)
