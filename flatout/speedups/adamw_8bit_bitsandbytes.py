"""AdamW with moments of eight bits, by bitsandbytes."""

from __future__ import annotations

from importlib.util import find_spec

from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if find_spec("bitsandbytes") is None:
        return 'It takes the package bitsandbytes, which is not installed: pip install "flatout[bitsandbytes]".'
    if config.parallel.shard > 1:
        return "Its kernels do not know of weights that are split over processes: set parallel.shard=1, or leave it out."
    return None


SPEEDUP = Speedup(
    name="adamw-8bit-bitsandbytes",
    fills={
        "optimizer": lazy("flatout.optimizers.eight_bits:with_bitsandbytes"),
        "moments": lazy("flatout.optimizers.eight_bits:bitsandbytes_bytes"),
    },
    saves="memory: as adamw-8bit, and nothing is compiled; but it waits for the device after every parameter",
    promise=Promise.statistical(),
    why_not=_why_not,
    rank=730,
    auto={
        "cpu": Off("it costs time on a CPU: name adamw-8bit where memory is short"),
        "cuda": Off("name it where memory is short and compiling is not wanted"),
    },
)
