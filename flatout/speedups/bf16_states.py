"""Keep the states of an eigenstate network in bfloat16 between its recurrence and the next matmul.

The matmul rounds the states to bfloat16 anyway. What changes is the gradient of the eigenvalues,
which reads the rounded states.
"""

from __future__ import annotations

from flatout.assembly.conditions import uses_gpu, without_triton
from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if not uses_gpu(machine, config):
        return None
    return without_triton(machine, config, (7, 0), instead="fast-scan", what="Triton")


SPEEDUP = Speedup(
    name="bf16-states",
    fills={"ops.scan": lazy("flatout.ops.scan:triton_narrow")},
    saves="time and memory: the recurrence reads its drive and writes its states in bf16, and "
    "computes in fp32",
    promise=Promise.rounding(rtol=2e-2),
    needs=("bf16", "folded-weights"),
    why_not=_why_not,
    predicted=(
        "0.5% on eigenstate-small-32k: 5.1 KB less per token and layer (8.7 to 3.6 KB), times "
        "131,072 tokens and 8 layers is 5.4 GB, or 1.2 ms at 4.3 TB/s, of 225 ms per micro-batch; "
        "and about 1 GB less to keep for backward"
    ),
    rank=520,
    auto={
        "cpu": Off("it needs bf16, which is off on a CPU"),
        "cuda": Off("its effect on the loss of a long run has not been measured"),
    },
)
