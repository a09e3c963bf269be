"""Gather sharded weights in bfloat16 under parallel.shard: two bytes per weight instead of four.

Matmuls under autocast round their weights to bfloat16 anyway, so for them the rounding only
happens earlier. The gains of norms, which autocast leaves in fp32, are rounded too. The tolerance
allows for that. Gradients are summed in fp32.
"""

from __future__ import annotations

from flatout.assembly.recipe import Off, On, Speedup, Tolerance, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine

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
        "nothing on one H200, which gathers from no other GPU. llama-8b on 8 of them: 7.5 of 8.0 "
        "billion weights are in blocks, gathered twice per micro-batch (forward and backward). "
        "Each process receives 7/8 of them, 52 GB in fp32 and 26 GB in bf16, which at the 370 GB/s "
        "that NCCL reaches over NVLink is 71 ms less traffic per micro-batch, hidden behind "
        "matmuls while these take longer, and rounding 7.5 billion weights, 6 bytes each, 10 ms "
        "at 4.3 TB/s, shrinks to an eighth"
    ),
    rank=260,
    auto={
        "cpu": Off("it needs bf16, which is off on a CPU"),
        "cuda": On("each process receives half the bytes of the weights"),
    },
)
