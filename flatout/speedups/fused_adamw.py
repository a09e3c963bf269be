"""Update all parameters with AdamW in one kernel, instead of a dozen small operations for each."""

from flatout.assembly.recipe import On, Speedup, Tolerance, lazy

SPEEDUP = Speedup(
    name="fused-adamw",
    fills={"optimizer": lazy("flatout.optim.adamw:fused")},
    saves="time: each step makes one pass over weights, gradients and moments",
    tolerance=Tolerance.rounding(rtol=1e-4),
    rank=710,
    auto={"cpu": On(measured=True), "cuda": On()},
)
