"""Compute the recurrence of an eigenstate network in chunks, with matmuls."""

from flatout.assembly.recipe import On, Speedup, Tolerance, lazy

SPEEDUP = Speedup(
    name="fast-scan",
    fills={"ops.scan": lazy("flatout.ops.scan:chunked")},
    saves="time: T sequential steps become a few matmuls and at most sqrt(T) sequential steps; "
    "memory: one state per token is kept",
    tolerance=Tolerance.rounding(rtol=1e-4),
    rank=530,
    auto={"cpu": On(measured=True), "cuda": On()},
)
