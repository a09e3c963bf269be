"""Processes wait for each other's gradients or weights."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix, speedup_fixes
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.15
"""Share of the step from which it is a finding."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when communication that nothing covers takes time."""
    seconds = evidence.phases.communication_s
    share = evidence.share(seconds)
    if share is None or seconds is None or share < WORTH_TELLING or evidence.world_size < 2:
        return None
    fixes = [
        Fix(
            text="Accumulate more micro-batches per step, so that gradients travel less often.",
            gain=share / 2,
            gain_from="half as many exchanges per token",
            same_result=False,
        )
    ]
    fixes = [*speedup_fixes(evidence, "grad_sync", "Exchange gradients once per step"), *fixes]
    return Finding(
        verdict=f"{share:.0%} of each step waits for communication between {evidence.world_size} "
        "processes.",
        harm="slows",
        figures={"communication_ms": 1e3 * seconds, "processes": evidence.world_size},
        share=share,
        fixes=tuple(fixes),
    )


FINDING = FindingRule(name="communication", look=look)
