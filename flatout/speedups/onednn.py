"""Run fp32 matmuls of the model, its loss and Muon through oneDNN instead of MKL, on a CPU."""

from __future__ import annotations

from flatout.assembly.conditions import uses_gpu
from flatout.assembly.recipe import On, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if uses_gpu(machine, config):
        return "It only applies to CPUs, and this run uses a GPU."
    if config.train.precision in ("bf16", "fp16"):
        return f"It only applies to fp32 matmuls, and train.precision={config.train.precision}."
    return None


SPEEDUP = Speedup(
    name="onednn",
    fills={
        "ops.linear": lazy("flatout.ops.linear:onednn"),
        "ops.cross_entropy": lazy("flatout.ops.cross_entropy:onednn"),
        "ops.newton_schulz": lazy("flatout.ops.newton_schulz:onednn"),
    },
    saves="time: matmuls use 512-bit vectors on processors where torch's MKL uses 256-bit ones",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=290,
    auto={"cpu": On(measured=True)},
)
