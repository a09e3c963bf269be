"""Compute the recurrence of an eigenstate network in Triton: in registers, chunks in parallel."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import On, Speedup, Tolerance, first_of, needs_gpu, needs_package


def apply(parts: Parts) -> None:
    """Use the Triton kernels."""
    parts.scan = named("flatout.ops.scan:triton")


SPEEDUP = Speedup(
    name="triton-scan",
    apply=apply,
    saves="time and memory: the drive is read twice and the states are written once, in the "
    "drive's dtype, with no intermediate results",
    tolerance=Tolerance.rounding(rtol=1e-4),
    why_not=first_of(needs_gpu("Triton", (7, 0)), needs_package("triton")),
    rank=510,
    auto={"cuda": On("it moves the fewest bytes of all scans")},
)
