"""Choose as many rows per micro-batch as the device uses efficiently."""

from __future__ import annotations

from flatout.assembly.parts import Parts
from flatout.assembly.speedup import On, Speedup, Tolerance
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine

ENOUGH_TOKENS = {"cuda": 65_536, "cpu": 4_096}
"""Tokens per micro-batch beyond which more bring nothing: on a CPU the caches are full (LOG.md). On
a GPU the kernels are, which is not measured yet. Other devices, such as mps, take the CPU's.
"""


def useful_rows(seq_len: int, device: str) -> int:
    """Return the rows of a micro-batch beyond which more bring nothing."""
    return max(ENOUGH_TOKENS.get(device.partition(":")[0], ENOUGH_TOKENS["cpu"]) // seq_len, 1)


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    if config.batch.rows_per_device != "auto":
        return f"batch.rows_per_device={config.batch.rows_per_device} is set."
    if config.batch.accumulate:
        return "batch.accumulate is set, which determines the rows."
    return None


def apply(parts: Parts) -> None:
    """Choose as many rows as are useful."""
    parts.most_rows = useful_rows


SPEEDUP = Speedup(
    name="micro-batch",
    apply=apply,
    saves="time: a micro-batch has as many rows as the device uses efficiently, while the baseline "
    "has at most 12",
    tolerance=Tolerance.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=140,
    auto={"cpu": On(measured=True), "cuda": On()},
)
