"""What an eigenstate network does to its drive and its states by fixed factors, done to the weights beside them once a micro-batch."""

from __future__ import annotations

from flatout.recipe import Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="folded-weights",
    fills={"ops.folding": lazy("flatout.ops.folding:folded")},
    saves="time and memory: no pass over the drive for its gain, none over the states for their coupling, and a drive in bf16 stays so",
    promise=Promise.rounding(rtol=1e-4),
)
