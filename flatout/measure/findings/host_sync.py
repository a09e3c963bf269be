"""User code reads values of tensors in every step, which makes the host wait for the GPU."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.03
"""Share of a GPU's step from which it is a finding."""
MANY = 2.0
"""Reads per step from which it is mentioned on a CPU, where they cost nothing."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when user code reads values in every step."""
    found = evidence.counts
    if found.syncs is None:
        return None
    reads = found.syncs - (found.expected_syncs or 0.0)
    site = evidence.site("sync")
    where = f" at {site.describe()}" if site is not None else ""
    if not evidence.on_gpu:
        if reads < MANY:
            return None
        return Finding(
            verdict=f"Each step reads {reads:.0f} values of tensors{where}. On a CPU that costs "
            "little; on a GPU each makes the host wait.",
            harm="warns",
            figures={"reads_per_step": reads},
            site=site,
            fixes=(_fix(None),),
        )
    idle_s, waits_s = evidence.phases.host_s, found.sync_s
    if reads < 1 or idle_s is None or waits_s is None:
        return None
    share = evidence.share(min(idle_s, waits_s))
    if share is None or share < WORTH_TELLING:
        return None
    return Finding(
        verdict=f"{share:.0%} of each step is lost to {reads:.0f} reads of tensors{where}: the "
        "host waits for the GPU, and then the GPU for the host.",
        harm="slows",
        figures={"reads_per_step": reads, "waits_ms": 1e3 * waits_s, "idle_ms": 1e3 * idle_s},
        share=share,
        site=site,
        fixes=(_fix(share),),
    )


def _fix(share: float | None) -> Fix:
    return Fix(
        text="Keep figures on the device, and read them every few steps, one step late.",
        gain=share,
        gain_from=None if share is None else "the time at which the GPU idles in these waits",
    )


FINDING = FindingRule(name="host-sync", look=look)
