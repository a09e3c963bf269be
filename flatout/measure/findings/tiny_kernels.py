"""A step consists of many tiny operations, which take longer to start than to run."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.findings.idle_gpu import fixes_for_overhead
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.25
"""Share of the step from which they are a finding."""
MANY = 300.0
"""Tiny operations per step from which they are a finding."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when tiny operations dominate."""
    found = evidence.counts
    if found.tiny_ops is None or found.tiny_op_s is None or found.tiny_ops < MANY:
        return None
    lost_s = found.tiny_op_s
    if evidence.on_gpu:  # they only cost time where the device waits for the next one
        if evidence.phases.host_s is None:
            return None
        lost_s = min(lost_s, evidence.phases.host_s)
    share = evidence.share(lost_s)
    if share is None or share < WORTH_TELLING:
        return None
    site = evidence.site("op") or evidence.site("compute") or evidence.site("python")
    fixes = fixes_for_overhead(evidence, share)
    if site is not None:
        fixes = (
            Fix(
                text=f"Compute {site.describe()} for all elements at once instead of one by one.",
                gain=share,
                gain_from="the step without the tiny operations",
            ),
            *fixes,
        )
    return Finding(
        verdict=f"{share:.0%} of each step goes into {found.tiny_ops:,.0f} tiny operations, which "
        "take longer to start than to run.",
        harm="slows",
        figures={
            "tiny_ops_per_step": found.tiny_ops,
            "ops_per_step": found.ops,
            "tiny_ops_ms": 1e3 * found.tiny_op_s,
            "step_ms": 1e3 * (evidence.step_s or 0.0),
        },
        share=share,
        site=site,
        fixes=fixes,
    )


FINDING = FindingRule(name="tiny-kernels", look=look)
