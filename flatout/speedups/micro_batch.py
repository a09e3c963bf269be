"""As many windows in a micro-batch as the device uses well and holds."""

from __future__ import annotations

from flatout.config import RunConfig
from flatout.hardware import Machine
from flatout.recipe import MicroBatchPlan, Promise, Speedup, lazy

ENOUGH_TOKENS = {"cuda": 65_536, "cpu": 4_096}
"""Tokens of a micro-batch that suffice: on a CPU the caches are full beyond (LOG.md); on a GPU the kernels are, not measured yet."""
USED_MEMORY = 0.8
"""Share of the device's memory that the estimate may fill."""


def largest_useful(plan: MicroBatchPlan) -> int:
    """Return the most rows that divide a rank's share of the step, fit the memory, and are not more than enough."""
    from flatout.memory import estimate, rows_that_fit

    room = int(USED_MEMORY * plan.memory_bytes)
    enough = max(ENOUGH_TOKENS[plan.device.partition(":")[0]] // plan.workload.seq_len, 1)
    rows = _largest_divisor(plan.rows_per_rank, enough)
    if rows > 1 and estimate(plan.workload, rows).total > room:
        rows = _largest_divisor(plan.rows_per_rank, rows_that_fit(plan.workload, room))
    return rows


def _largest_divisor(number: int, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if config.batch.rows_per_device != "auto":
        return f"batch.rows_per_device={config.batch.rows_per_device} is set."
    return "batch.accumulate is set, so the rows follow from it." if config.batch.accumulate else None


SPEEDUP = Speedup(
    name="micro-batch",
    fills={"micro_batch": lazy("flatout.speedups.micro_batch:largest_useful")},
    saves="time: larger matrix products, and fewer times through the model a step",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
)
