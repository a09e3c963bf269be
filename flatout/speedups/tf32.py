"""Run fp32 matmuls on tensor cores, with inputs rounded to TF32's 10 bits of mantissa."""

from __future__ import annotations

from flatout.assembly.conditions import gpu_below, uses_gpu
from flatout.assembly.recipe import On, Promise, Speedup
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if not uses_gpu(machine, config):
        return "TF32 needs an NVIDIA GPU, and this run uses a CPU."
    return gpu_below(machine, (8, 0), "TF32")


SPEEDUP = Speedup(
    name="tf32",
    fills={"matmul": "high"},
    saves="time: fp32 matmuls run on tensor cores; bf16 and fp16 matmuls already do",
    promise=Promise.rounding(rtol=5e-3),
    why_not=_why_not,
    rank=210,
    auto={"cuda": On()},
)
