"""Compute the loss and its gradients with Liger's kernel, never holding all logits."""

from __future__ import annotations

from importlib.util import find_spec

from flatout.assembly.conditions import gpu_below, uses_gpu
from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if not uses_gpu(machine, config):
        return "It needs a GPU: Liger's kernels do not run on a CPU."
    if find_spec("liger_kernel") is None:
        return 'It needs the package liger-kernel: pip install "flatout[liger]".'
    return gpu_below(machine, (8, 0), "Triton")


SPEEDUP = Speedup(
    name="liger-ce",
    fills={"ops.cross_entropy": lazy("flatout.ops.cross_entropy:liger")},
    saves="memory: logits exist one chunk at a time, and one kernel turns a chunk into its "
    "gradients",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=630,
    auto={
        "cuda": Off(
            "chunked-ce does the same and never waits for the device; which one is faster has "
            "not been measured"
        ),
    },
)
