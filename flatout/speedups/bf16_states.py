"""The states of an eigenstate network in bfloat16 between the recurrence and the product that
follows.
"""

from __future__ import annotations

from flatout.assembly.conditions import uses_gpu
from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine
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
    predicted=(
        "0.5% on eigenstate-small-32k: 5.1 KB fewer a token and layer (8.7 to 3.6 KB), times 131,072 tokens and 8 layers is 5.4 GB, "
        "or 1.2 ms at 4.3 TB/s, of 225 ms a micro-batch; and about 1 GB less to keep for backward"
    ),
    rank=520,
    auto={
        "cpu": Off("it needs bf16, which is off on a CPU"),
        "cuda": Off("what it does to the loss of a long run is open"),
    },
)
"""The product that follows rounds the states to bfloat16 anyway: what changes is the gradient of
the eigenvalues, by the states that it reads.
"""
