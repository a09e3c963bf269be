"""Choose the most rows per micro-batch that the device uses efficiently and that fit in memory."""

from __future__ import annotations

from flatout.assembly.recipe import MicroBatchPlan, On, Speedup, Tolerance, divisors
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine

ENOUGH_TOKENS = {"cuda": 65_536, "cpu": 4_096}
"""Tokens per micro-batch beyond which more bring nothing: on a CPU the caches are full (LOG.md). On
a GPU the kernels are, which is not measured yet. Other devices, such as mps, take the CPU's.
"""


def largest_useful(plan: MicroBatchPlan) -> int:
    """Return the most useful rows that divide a rank's share of the step and fit in memory."""
    tokens = ENOUGH_TOKENS.get(plan.device.partition(":")[0], ENOUGH_TOKENS["cpu"])
    enough = max(tokens // plan.seq_len, 1)
    rows = next(divisors(plan.rows_per_rank, enough))
    if rows == 1 or plan.fits(rows):
        return rows
    return next(divisors(plan.rows_per_rank, plan.most_rows()))


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    if config.batch.rows_per_device != "auto":
        return f"batch.rows_per_device={config.batch.rows_per_device} is set."
    if config.batch.accumulate:
        return "batch.accumulate is set, which determines the rows."
    return None


SPEEDUP = Speedup(
    name="micro-batch",
    fills={"micro_batch": largest_useful},
    saves="time: a micro-batch has as many rows as the device uses efficiently, while the baseline "
    "has at most 12",
    tolerance=Tolerance.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=140,
    auto={"cpu": On(measured=True), "cuda": On()},
)
