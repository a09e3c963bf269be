"""AdamW with 8-bit moments, from torchao."""

from __future__ import annotations

from flatout.assembly.conditions import uses_gpu, without_compiler, without_package
from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if against := without_package("torchao", extra="adamw-8bit"):
        return against
    if not uses_gpu(machine, config) and without_compiler(machine, config):
        return "On a CPU its kernels need a C++ compiler: apt install g++."
    if config.parallel.shard > 1:
        return (
            "Checkpoints do not support sharded 8-bit moments: "
            "set parallel.shard=1, or leave it out."
        )
    return None


SPEEDUP = Speedup(
    name="adamw-8bit",
    fills={
        "optimizer": lazy("flatout.speedups.adamw_8bit.torchao:adamw_8bit"),
        "moments": lazy("flatout.speedups.adamw_8bit.torchao:moment_bytes"),
    },
    saves="memory: AdamW's moments take 2 bytes per weight instead of 8; those of small "
    "tensors stay in fp32",
    promise=Promise.statistical(),
    why_not=_why_not,
    rank=720,
    auto={
        "cpu": Off("it is slower on a CPU; use it where memory is short"),
        "cuda": Off("use it where memory is short"),
    },
)
