"""AdamW with 8-bit moments, from torchao."""

from __future__ import annotations

from flatout.assembly.conditions import (
    first_of,
    needs_package,
    without_compiler,
)
from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _sharded(_machine: Machine, config: RunConfig) -> str | None:
    if config.parallel.shard == 1:
        return None
    return (
        "Checkpoints do not support sharded 8-bit moments: set parallel.shard=1, or leave it out."
    )


SPEEDUP = Speedup(
    name="adamw-8bit",
    fills={
        "optimizer": lazy("flatout.speedups.adamw_8bit.torchao:adamw_8bit"),
        "moments": lazy("flatout.speedups.adamw_8bit.torchao:moment_bytes"),
    },
    saves="memory: AdamW's moments take 2 bytes per weight instead of 8; those of small "
    "tensors stay in fp32",
    promise=Promise.statistical(),
    why_not=first_of(needs_package("torchao", extra="adamw-8bit"), without_compiler, _sharded),
    rank=720,
    auto={
        "cpu": Off("it is slower on a CPU; use it where memory is short"),
        "cuda": Off("use it where memory is short"),
    },
)
