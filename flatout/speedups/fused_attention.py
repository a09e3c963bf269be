"""Attention in one kernel that never holds the matrix of scores."""

from __future__ import annotations

from flatout.config import RunConfig
from flatout.hardware import Machine
from flatout.recipe import Promise, Speedup, lazy


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    return "An eigenstate network has no attention." if config.model.kind == "eigenstate" else None


SPEEDUP = Speedup(
    name="fused-attention",
    fills={"ops.attention": lazy("flatout.ops.attention:fused")},
    saves="time and memory: the scores of T x T tokens a head are never written out",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
)
