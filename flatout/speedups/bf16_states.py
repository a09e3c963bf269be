"""The states of an eigenstate network in bfloat16 between the recurrence and the product that follows."""

from __future__ import annotations

from flatout.config import RunConfig
from flatout.hardware import Machine
from flatout.recipe import Promise, Speedup, lazy, uses_gpu
from flatout.speedups.triton_scan import SPEEDUP as TRITON_SCAN


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    return TRITON_SCAN.why_not(machine, config) if uses_gpu(machine, config) else None


SPEEDUP = Speedup(
    name="bf16-states",
    fills={"ops.scan": lazy("flatout.ops.scan:triton_narrow")},
    saves="time and memory: the recurrence reads its drive and writes its states in two bytes a number, and computes in fp32",
    promise=Promise.rounding(rtol=2e-2),
    needs=("bf16", "folded-weights"),
    why_not=_why_not,
)
