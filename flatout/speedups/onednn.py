"""fp32 products of the model, its loss and Muon through oneDNN instead of MKL, on a CPU."""

from __future__ import annotations

from flatout.assembly.conditions import uses_gpu
from flatout.assembly.recipe import On, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if uses_gpu(machine, config):
        return "It is for products on a CPU, and this run is on a GPU."
    stated = {"bf16", "fp16"} & {config.train.precision}
    return f"It is for fp32 products, and train.precision={stated.pop()}." if stated else None


SPEEDUP = Speedup(
    name="onednn",
    fills={
        "ops.linear": lazy("flatout.ops.linear:onednn"),
        "ops.cross_entropy": lazy("flatout.ops.cross_entropy:onednn"),
        "ops.newton_schulz": lazy("flatout.ops.newton_schulz:onednn"),
    },
    saves="time: products use 512-bit vectors on processors on which torch's MKL stays at 256 bits",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=290,
    auto={"cpu": On(unless=("bf16-products",), measured=True)},
)
