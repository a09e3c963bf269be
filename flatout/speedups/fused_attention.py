"""Attention in one kernel that never stores the matrix of scores."""

from flatout.assembly.recipe import On, Speedup, Tolerance, lazy

SPEEDUP = Speedup(
    name="fused-attention",
    fills={"ops.attention": lazy("flatout.ops.attention:fused")},
    saves="time and memory: the T x T attention scores are never written to memory",
    tolerance=Tolerance.rounding(rtol=1e-4),
    rank=440,
    auto={
        "cpu": On(measured=True),
        "cuda": On(),
    },
)
