"""Steps wait for data that comes from a slow disk."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.findings.slow_data import WORTH_TELLING, data_figures, lost_to_data
from flatout.measure.instruments.evidence import Evidence

MIN_STALLED = 0.2
"""Share of the wait at which the machine must have waited for a disk."""
MIN_BYTES = 64 * 2**10
"""Fewest bytes per step that come from a disk."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the disk is what data waits for."""
    share, data = lost_to_data(evidence), evidence.data
    wait_s, stalled_s = evidence.phases.data_wait_s, data.disk_stalled_s
    if share is None or wait_s is None or share < WORTH_TELLING or stalled_s is None:
        return None
    if stalled_s < MIN_STALLED * wait_s or (data.read_bytes_per_step or 0.0) < MIN_BYTES:
        return None
    rate = (data.read_bytes_per_step or 0.0) / wait_s / 1e6
    return Finding(
        verdict=f"{share:.0%} of each step waits for a disk that delivers {rate:.3g} MB/s.",
        harm="slows",
        figures=data_figures(evidence)
        | {"disk_stalled_ms": 1e3 * stalled_s, "disk_mb_per_s": rate},
        share=share,
        site=evidence.site("data"),
        fixes=(
            Fix(
                text="Copy the data to a local disk, or to memory if it fits there.",
                gain=share,
                gain_from="the step without its wait for data",
            ),
        ),
    )


FINDING = FindingRule(name="slow-disk", look=look)
