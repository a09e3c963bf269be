"""Normalise and rotate query and key heads in few passes, with a hand-written gradient."""

from __future__ import annotations

from flatout.assembly.recipe import Off, On, Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="fused-heads",
    fills={"ops.heads": lazy("flatout.ops.heads:fused")},
    saves="time: normalising and rotating queries and keys takes half the passes over memory when "
    "the model is not compiled",
    promise=Promise.rounding(rtol=1e-4),
    rank=450,
    auto={"cpu": On(measured=True), "cuda": Off("compile fuses the same passes there")},
)
