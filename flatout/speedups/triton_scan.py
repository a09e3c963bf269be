"""Compute the recurrence of an eigenstate network in Triton: in registers, chunks in parallel."""

from __future__ import annotations

from flatout.assembly.conditions import without_triton
from flatout.assembly.recipe import On, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    return without_triton(machine, config, (7, 0), instead="fast-scan", what="Triton")


SPEEDUP = Speedup(
    name="triton-scan",
    fills={"ops.scan": lazy("flatout.ops.scan:triton")},
    saves="time and memory: the drive is read twice and the states are written once, in the "
    "drive's own dtype, without intermediate results",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=510,
    auto={"cuda": On("of all scans it moves the fewest bytes", unless=("bf16-states",))},
)
