"""torch.compile: the model's forward and backward as generated, fused kernels."""

from __future__ import annotations

from typing import Any

from flatout.recipe import Promise, Speedup, Transform
from flatout.speedups.compile_blocks import compile_blocks, without_compiler


def _compile(model: Any, mesh: Any) -> Any:
    """Compile in place, so that parameter names stay; by block under fully_shard, whose hooks break a whole graph."""
    if mesh.shard > 1:
        return compile_blocks(model, mesh)
    model.compile(dynamic=False)
    return model


SPEEDUP = Speedup(
    name="compile",
    fills={"compilation": "whole model"},
    transform=Transform("compile", _compile),
    saves="time: elementwise work is fused, and Python no longer steps through the model",
    promise=Promise.rounding(rtol=1e-3),
    compiles=True,
    why_not=without_compiler,
)
