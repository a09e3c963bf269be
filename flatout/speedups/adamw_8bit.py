"""AdamW with moments of eight bits, by torchao."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

from flatout.assembly.recipe import Off, Promise, Speedup, lazy, uses_gpu
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if find_spec("torchao") is None:
        return 'It takes the package torchao, which is not installed: pip install "flatout[adamw-8bit]".'
    if not uses_gpu(machine, config) and not (shutil.which("g++") or shutil.which("clang++")):
        return "Its kernels are compiled, and on a CPU that needs a C++ compiler: apt install g++."
    if config.parallel.shard > 1:
        return "Checkpoints do not hold moments of eight bits that are split over processes: set parallel.shard=1, or leave it out."
    return None


SPEEDUP = Speedup(
    name="adamw-8bit",
    fills={
        "optimizer": lazy("flatout.optimizers.eight_bits:with_torchao"),
        "moments": lazy("flatout.optimizers.eight_bits:torchao_bytes"),
    },
    saves="memory: AdamW's moments take 2 bytes a weight instead of 8; those of small tensors stay fp32",
    promise=Promise.statistical(),
    why_not=_why_not,
    rank=720,
    auto={
        "cpu": Off("it costs time on a CPU: name it where memory is short"),
        "cuda": Off("name it where memory is short"),
    },
)
