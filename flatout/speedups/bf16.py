"""Matmuls in bfloat16 (autocast). Weights, gradients and optimizer state stay fp32."""

from __future__ import annotations

from flatout.assembly.parts import Parts, Precision
from flatout.assembly.speedup import Off, On, Speedup, Tolerance, gpu_below, uses_gpu
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    too_old = gpu_below(machine, (8, 0), "bfloat16") if uses_gpu(machine, config) else None
    return too_old and f"{too_old} Use fp16 instead: train.precision=fp16."


def apply(parts: Parts) -> None:
    """Cast matmuls to bfloat16."""
    parts.precision = Precision("bf16", autocast="bfloat16")


SPEEDUP = Speedup(
    name="bf16",
    apply=apply,
    saves="time and memory: matmuls run on tensor cores, and activations take 2 bytes, and "
    "bfloat16 has the range of fp32, so the loss needs no scaling",
    tolerance=Tolerance.rounding(rtol=2e-2),
    why_not=_why_not,
    rank=220,
    auto={
        "cpu": Off(
            "autocast also casts operations that a CPU runs faster in fp32 (LOG.md), "
            "while bf16-products casts only matmuls",
            measured=True,
        ),
        "cuda": On(),
    },
)
