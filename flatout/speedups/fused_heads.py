"""Query and key heads normalised and turned in few passes, with the gradient by hand."""

from __future__ import annotations

from flatout.config import RunConfig
from flatout.hardware import Machine
from flatout.recipe import Promise, Speedup, lazy


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    return "An eigenstate network has no queries and keys." if config.model.kind == "eigenstate" else None


SPEEDUP = Speedup(
    name="fused-heads",
    fills={"ops.heads": lazy("flatout.ops.heads:fused")},
    saves="time: normalising and turning queries and keys takes half the passes over memory when the model is not compiled",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
)
