"""The run ends with an error that no other rule explains."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the run failed."""
    failure = evidence.failure
    if failure is None or failure.kind != "error":
        return None
    at = f" at step {failure.step}" if failure.step else ""
    return Finding(
        verdict=f"The run fails{at}: {failure.message.rstrip('.')}.",
        harm="fails",
        site=failure.site,
        fixes=(Fix(text=failure.fix),) if failure.fix else (),
    )


FINDING = FindingRule(name="failure", look=look)
