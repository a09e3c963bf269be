"""Compute the recurrence of an eigenstate network in Triton: in registers, chunks in parallel."""

from flatout.assembly.recipe import On, Speedup, Tolerance, first_of, lazy, needs_gpu, needs_package

SPEEDUP = Speedup(
    name="triton-scan",
    fills={"ops.scan": lazy("flatout.ops.scan:triton")},
    saves="time and memory: the drive is read twice and the states are written once, in the "
    "drive's dtype, with no intermediate results",
    tolerance=Tolerance.rounding(rtol=1e-4),
    why_not=first_of(needs_gpu("Triton", (7, 0), instead="fast-scan"), needs_package("triton")),
    rank=510,
    auto={"cuda": On("it moves the fewest bytes of all scans")},
)
