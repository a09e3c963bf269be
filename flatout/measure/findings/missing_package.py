"""An optional package that the recipe or its code needs is not installed."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the run failed for a package."""
    failure = evidence.failure
    if failure is None or failure.kind != "missing-package":
        return None
    return Finding(
        verdict=failure.message,
        harm="fails",
        site=failure.site,
        fixes=(Fix(text=failure.fix or "Install it."),),
    )


FINDING = FindingRule(name="missing-package", look=look)
