"""Other processes use the cores on which the run computes."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

MIN_CORES = 0.5
"""Cores that others must keep busy."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when a run on the CPU shares its cores."""
    host = evidence.host
    others, cores, threads = host.other_busy_cores, host.cores, host.threads or 1
    if evidence.device != "cpu" or others is None or cores is None or others < MIN_CORES:
        return None
    if others + threads <= cores:
        return None
    fix = "Stop them, or wait."
    if threads > 1:
        fix = "Stop them, or set OMP_NUM_THREADS=1: threads that wait for each other are slower."
    return Finding(
        verdict=f"Other processes keep {others:.1f} of {cores} cores busy; figures measured now "
        "are too slow.",
        harm="warns",
        figures={"other_busy_cores": others, "cores": cores, "threads": threads},
        fixes=(Fix(text=fix),),
    )


FINDING = FindingRule(name="busy-machine", look=look)
