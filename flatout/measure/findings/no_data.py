"""There is no prepared dataset at the path of the recipe."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the data is missing or unusable."""
    failure = evidence.failure
    missing, fix = evidence.data.missing, evidence.data.missing_fix
    if missing is None and failure is not None and failure.kind == "no-data":
        missing, fix = failure.message, failure.fix
    if missing is None:
        return None
    return Finding(
        verdict=missing,
        harm="fails",
        figures={"path": evidence.setting("data.path")},
        fixes=(Fix(text=fix or "Prepare one: `flatout prepare FILE --out data/NAME`."),),
    )


FINDING = FindingRule(name="no-data", look=look)
