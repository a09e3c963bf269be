"""Attention in one kernel that never stores the matrix of scores."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import On, Speedup, Tolerance


def apply(parts: Parts) -> None:
    """Use one kernel for attention."""
    parts.attention = named("flatout.ops.attention:fused")


SPEEDUP = Speedup(
    name="fused-attention",
    apply=apply,
    saves="time and memory: the T x T attention scores are never written to memory",
    tolerance=Tolerance.rounding(rtol=1e-4),
    rank=440,
    auto={
        "cpu": On(measured=True),
        "cuda": On(),
    },
)
