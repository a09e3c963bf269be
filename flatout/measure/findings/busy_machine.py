"""Other processes use the cores on which the run computes."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence
from flatout.progress import counted

MIN_CORES = 0.5
"""Cores that others must keep busy."""

MIN_SHARE = 0.1
"""Share of a recorded run in which they must."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when a run on the CPU shares its cores."""
    host = evidence.host
    others, cores, threads = host.other_busy_cores, host.cores, host.threads or 1
    if evidence.device != "cpu" or others is None or cores is None or others < MIN_CORES:
        return None
    if others + threads <= cores or (host.busy_share or 1.0) < MIN_SHARE:
        return None
    fix = "Stop them, or wait."
    if threads > 1:
        fix = "Stop them, or set OMP_NUM_THREADS=1: threads that wait for each other are slower."
    when = "" if host.busy_share is None else f" for {host.busy_share:.0%} of the run"
    left = max(cores - others, 0.0)
    return Finding(
        verdict=f"Other processes keep {others:.1f} of {cores} cores busy{when}, which leaves "
        f"{left:.1f} for {counted(threads, 'thread')}; figures measured then are too slow.",
        harm="slows",
        figures={
            "other_busy_cores": others,
            "cores": cores,
            "threads": threads,
            "busy_share": host.busy_share,
        },
        share=(1 - left / threads) * (host.busy_share or 1.0),
        fixes=(Fix(text=fix),),
    )


FINDING = FindingRule(name="busy-machine", look=look)
