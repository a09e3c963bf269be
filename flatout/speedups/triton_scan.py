"""Compute the recurrence of an eigenstate network in Triton: in registers, chunks in parallel."""

from __future__ import annotations

from functools import partial

from flatout.assembly.conditions import without_triton
from flatout.assembly.recipe import On, Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="triton-scan",
    fills={"ops.scan": lazy("flatout.ops.scan:triton")},
    saves="time and memory: the drive is read twice and the states are written once, in the "
    "drive's dtype, with no intermediate results",
    promise=Promise.rounding(rtol=1e-4),
    why_not=partial(without_triton, capability=(7, 0), instead="fast-scan", what="Triton"),
    rank=510,
    auto={"cuda": On("it moves the fewest bytes of all scans")},
)
