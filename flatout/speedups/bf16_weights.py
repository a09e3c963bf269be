"""Weights that lie in memory as bfloat16, with what rounding took off beside them, so that the update is that of fp32."""

from __future__ import annotations

from typing import Any

from flatout.config import RunConfig
from flatout.hardware import Machine
from flatout.recipe import Promise, Speedup, Transform


def _split(model: Any, mesh: Any) -> Any:
    from flatout.models.split_weights import split_weights

    return split_weights(model, mesh)


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if config.parallel.shard > 1:
        return "parallel.shard splits the weights themselves, which it takes to be of one type: leave bf16-weights out, or set parallel.shard=1."
    return None


SPEEDUP = Speedup(
    name="bf16-weights",
    transform=Transform("low-precision", _split),
    saves="memory and time: no weight is rounded in every micro-batch, and no rounded copy is kept for backward (2 bytes a weight)",
    promise=Promise.rounding(rtol=1e-4),
    needs=("bf16",),
    why_not=_why_not,
)
