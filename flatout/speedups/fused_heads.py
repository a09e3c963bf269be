"""Normalise and rotate query and key heads in few passes, with a hand-written gradient."""

from flatout.assembly.recipe import Off, On, Speedup, Tolerance, lazy

SPEEDUP = Speedup(
    name="fused-heads",
    fills={"ops.heads": lazy("flatout.ops.heads:fused")},
    saves="time: in a model that is not compiled, normalising and rotating queries and keys "
    "takes half as many passes over memory",
    tolerance=Tolerance.rounding(rtol=1e-4),
    rank=450,
    auto={"cpu": On(measured=True), "cuda": Off("compile fuses the same passes on a GPU")},
)
