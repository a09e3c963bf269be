"""As many rows in a micro-batch as the device uses well and holds, in place of the up to 12 that
people write.
"""

from __future__ import annotations

from flatout.assembly.plain import USED_MEMORY, MicroBatchPlan
from flatout.assembly.recipe import On, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine

ENOUGH_TOKENS = {"cuda": 65_536, "cpu": 4_096}
"""Tokens of a micro-batch that suffice: on a CPU the caches are full beyond (LOG.md); on a GPU the
kernels are, not measured yet.
"""


def largest_useful(plan: MicroBatchPlan) -> int:
    """Return the most rows that divide a rank's share of the step, fit the memory, and are not more
    than enough.
    """
    from flatout.assembly.memory import rows_that_fit

    enough = max(ENOUGH_TOKENS[plan.device.partition(":")[0]] // plan.workload.seq_len, 1)
    rows = next(plan.divisors(enough))
    if rows > 1 and not plan.fits(rows):
        rows = next(
            plan.divisors(rows_that_fit(plan.workload, int(USED_MEMORY * plan.memory_bytes)))
        )
    return rows


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if config.batch.rows_per_device != "auto":
        return f"batch.rows_per_device={config.batch.rows_per_device} is set."
    return (
        "batch.accumulate is set, so the rows follow from it." if config.batch.accumulate else None
    )


SPEEDUP = Speedup(
    name="micro-batch",
    fills={"micro_batch": lazy("flatout.speedups.micro_batch:largest_useful")},
    saves="time: as many rows in a micro-batch as the device uses well, in place of the up to 12 that people write",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=140,
    auto={"cpu": On(measured=True), "cuda": On()},
)
