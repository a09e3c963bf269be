"""Run fp32 matrix products on tensor cores, with inputs rounded to TF32's 10 bits of mantissa."""

from __future__ import annotations

from flatout.assembly.conditions import gpu_below, uses_gpu
from flatout.assembly.recipe import On, Promise, Speedup
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if not uses_gpu(machine, config):
        return "TF32 is a format of NVIDIA's tensor cores, and this run is on a CPU."
    return gpu_below(machine, (8, 0), "TF32")


SPEEDUP = Speedup(
    name="tf32",
    fills={"matmul": "high"},
    saves="time: matrix products that stay fp32 run on tensor cores; those in bf16 or fp16 gain "
    "nothing more",
    promise=Promise.rounding(rtol=5e-3),
    why_not=_why_not,
    rank=210,
    auto={"cuda": On()},
)
