"""Choose the most rows per micro-batch that the device uses efficiently and that fit in memory."""

from __future__ import annotations

from flatout.assembly.plain import USED_MEMORY, MicroBatchPlan
from flatout.assembly.recipe import On, Promise, Speedup
from flatout.config.schema import RunConfig
from flatout.errors import HardwareError
from flatout.hardware import Machine
from flatout.progress import readable_memory

ENOUGH_TOKENS = {"cuda": 65_536, "cpu": 4_096}
"""Tokens per micro-batch beyond which more bring nothing: on a CPU the caches are full (LOG.md); on
a GPU the kernels are, which is not measured yet.
"""


def largest_useful(plan: MicroBatchPlan) -> int:
    """Return the most useful rows that divide a rank's share of the step and fit in memory."""
    from flatout.assembly.memory import estimate, most_rows

    enough = max(ENOUGH_TOKENS[plan.device.partition(":")[0]] // plan.workload.seq_len, 1)
    rows = next(plan.divisors(enough))
    if rows > 1 and not plan.fits(rows):
        available = int(USED_MEMORY * plan.memory_bytes)
        fitting = most_rows(plan.workload, available)
        if not fitting:
            least = estimate(plan.workload, 1, accumulate=2).total
            raise HardwareError(
                f"One sequence of {plan.workload.seq_len} tokens needs about "
                f"{readable_memory(least)}, and {readable_memory(available)} are available.",
                fix="Shorten data.seq_len, choose a smaller model, or shard it with "
                "parallel.shard.",
            )
        rows = next(plan.divisors(fitting))
    return rows


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    if config.batch.rows_per_device != "auto":
        return f"batch.rows_per_device={config.batch.rows_per_device} is set."
    if config.batch.accumulate:
        return "batch.accumulate is set, which determines the rows."
    return None


SPEEDUP = Speedup(
    name="micro-batch",
    fills={"micro_batch": largest_useful},
    saves="time: a micro-batch has as many rows as the device uses efficiently; the baseline "
    "has at most 12",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=140,
    auto={"cpu": On(measured=True), "cuda": On()},
)
