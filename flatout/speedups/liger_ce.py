"""Compute the loss and its gradients with Liger's kernel, never holding all logits."""

from flatout.assembly.recipe import (
    Off,
    Speedup,
    Tolerance,
    first_of,
    lazy,
    needs_gpu,
    needs_package,
)

SPEEDUP = Speedup(
    name="liger-ce",
    fills={"ops.cross_entropy": lazy("flatout.ops.cross_entropy:liger")},
    saves="memory: logits exist one chunk at a time, and one kernel turns a chunk into its "
    "gradients",
    tolerance=Tolerance.rounding(rtol=1e-4),
    why_not=first_of(
        needs_gpu("Liger's kernel", (8, 0)), needs_package("liger-kernel", extra="liger")
    ),
    rank=630,
    auto={
        "cuda": Off(
            "chunked-ce does the same and never waits for the device. Which one is faster has "
            "not been measured"
        ),
    },
)
