"""The run does not get on."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the run had to be ended."""
    failure = evidence.failure
    if failure is None or failure.kind != "hang":
        return None
    where = f" It was at {failure.site.describe()}." if failure.site is not None else ""
    return Finding(
        verdict=f"{failure.message}{where}",
        harm="fails",
        site=failure.site,
        fixes=(
            Fix(
                text="Look at the line: a lock, a read from a network, or a loop without an end."
                if failure.site is not None
                else "Start it with `flatout train`, and look at it with `py-spy dump --pid PID`."
            ),
        ),
    )


FINDING = FindingRule(name="hang", look=look)
