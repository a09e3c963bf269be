"""The recurrence of an eigenstate network in chunks: matrix products in place of a step a token."""

from __future__ import annotations

from flatout.assembly.recipe import On, Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="fast-scan",
    fills={"ops.scan": lazy("flatout.ops.scan:chunked")},
    saves="time: T steps that wait for each other become a few matrix products and sqrt(T) steps at most; memory: one state a token is kept",
    promise=Promise.rounding(rtol=1e-4),
    rank=530,
    auto={"cpu": On(measured=True), "cuda": On(unless=("triton-scan", "bf16-states"))},
)
