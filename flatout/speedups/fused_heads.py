"""Normalise and rotate query and key heads in few passes, with a hand-written gradient."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import Off, On, Speedup, Tolerance


def apply(parts: Parts) -> None:
    """Use the hand-written gradient."""
    parts.heads = named("flatout.ops.heads:fused")


SPEEDUP = Speedup(
    name="fused-heads",
    apply=apply,
    saves="time: in a model that is not compiled, normalising and rotating queries and keys "
    "takes half as many passes over memory",
    tolerance=Tolerance.rounding(rtol=1e-4),
    rank=450,
    auto={"cpu": On(measured=True), "cuda": Off("compile fuses the same passes on a GPU")},
)
