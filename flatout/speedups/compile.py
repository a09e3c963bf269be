"""torch.compile: the model's forward and backward as generated, fused kernels."""

from __future__ import annotations

import shutil
from typing import Any

from flatout.config import RunConfig
from flatout.hardware import Machine
from flatout.recipe import Promise, Speedup, Transform, uses_gpu


def _compile(model: Any, mesh: Any) -> Any:
    """Compile in place, so that parameter names stay; by block under fully_shard, whose hooks break a whole graph."""
    if mesh.shard > 1:
        for block in model.blocks:
            block.compile(dynamic=False)
    else:
        model.compile(dynamic=False)
    return model


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if not uses_gpu(machine, config) and not (shutil.which("g++") or shutil.which("clang++")):
        return "On a CPU torch.compile needs a C++ compiler: apt install g++."
    return None


SPEEDUP = Speedup(
    name="compile",
    transform=Transform("compile", _compile),
    saves="time: elementwise work is fused, and Python no longer steps through the model",
    promise=Promise.rounding(rtol=1e-3),
    why_not=_why_not,
)
