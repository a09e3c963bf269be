"""Gather sharded weights in bfloat16 under parallel.shard: two bytes per weight instead of four.

Matmuls under autocast round their weights to bfloat16 anyway, so for them the rounding only
happens earlier. The gains of norms, which autocast leaves in fp32, are rounded too. The tolerance
allows for that. Gradients are summed in fp32.
"""

from __future__ import annotations

from flatout.assembly.recipe import Off, On, Speedup, Tolerance, lazy
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine

SUPPORTED = ("transformer",)
"""Models whose blocks contain only matrices, biases and gains. The eigenvalues of `eigenstate` are
close to 1, where bfloat16 values are 1/256 apart.
"""


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    if not config.parallel.is_sharded:
        return "It only applies to weights sharded over several processes: set parallel.shard."
    if config.model.kind not in SUPPORTED:
        return (
            f"The blocks of {config.model.kind!r} may contain parameters that need fp32, "
            "and all parameters of a block are gathered in one dtype."
        )
    return None


SPEEDUP = Speedup(
    name="bf16-gathers",
    fills={"gather_dtype": lazy("torch:bfloat16")},
    saves="time and memory under parallel.shard: the blocks' weights are gathered in bf16, so "
    "autocast makes no bf16 copy of them",
    tolerance=Tolerance.rounding(rtol=2e-2),
    needs=("bf16",),
    why_not=_why_not,
    predicted=(
        "nothing on one GPU. With llama-8b on 8 GPUs, each process receives 26 GB of weights per "
        "micro-batch instead of 52 GB, which saves 71 ms of traffic at the 370 GB/s that NCCL "
        "reaches over NVLink. Matmuls may hide this time already"
    ),
    rank=260,
    auto={
        "cpu": Off("it needs bf16, which is off on a CPU"),
        "cuda": On("each process receives half the bytes of the weights"),
    },
)
