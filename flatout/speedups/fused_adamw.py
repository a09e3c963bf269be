"""Update all parameters with AdamW in one kernel, instead of a dozen small operations for each."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import On, Speedup, Tolerance


def apply(parts: Parts) -> None:
    """Use one kernel for AdamW."""
    parts.optimizer = named("flatout.optim.adamw:fused")


SPEEDUP = Speedup(
    name="fused-adamw",
    apply=apply,
    saves="time: each step makes one pass over weights, gradients and moments",
    tolerance=Tolerance.rounding(rtol=1e-4),
    rank=710,
    auto={"cpu": On(measured=True), "cuda": On()},
)
