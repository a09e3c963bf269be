"""torch.compile: the model's forward and backward as generated, fused kernels."""

from __future__ import annotations

from typing import Any

from flatout.assembly.recipe import Off, On, Promise, Speedup, Transform
from flatout.speedups.compile_blocks import compile_blocks, without_compiler


def _compile(model: Any, mesh: Any) -> Any:
    """Compile in place, so that parameter names stay; by block where there are several processes.

    The hooks of fully_shard break a whole graph. Beside DDP its backward pass is one piece: all
    gradients are there only at its end, and their exchange overlaps with nothing; by block it
    begins with the last block's. Torch's own remedy (`optimize_ddp`) cuts the graph of what is
    compiled inside DDP's forward, which the warm-up keeps out of, and no graph with a higher-order
    operation in it, as flex-attention is.
    """
    if mesh.world_size > 1:
        return compile_blocks(model, mesh)
    model.compile(dynamic=False, options=dict(model.compiler_options) or None)
    return model


SPEEDUP = Speedup(
    name="compile",
    fills={"compilation": "whole model"},
    transform=Transform("compile", _compile),
    saves="time: elementwise work is fused, and Python no longer steps through the model; with several processes it compiles by block",
    promise=Promise.rounding(rtol=1e-3),
    compiles=True,
    why_not=without_compiler,
    rank=910,
    auto={
        "cpu": Off(
            "a quarter faster on one CPU, after half a minute of compiling: name it for long runs",
            from_minutes=2,
            measured=True,
        ),
        "cuda": On(from_minutes=2),
    },
)
