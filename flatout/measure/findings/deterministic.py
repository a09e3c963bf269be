"""train.deterministic makes a run on a GPU slower."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when a run on a GPU uses only deterministic operations."""
    if not evidence.on_gpu or not evidence.setting("train.deterministic"):
        return None
    return Finding(
        verdict="train.deterministic=true uses slower operations on a GPU.",
        harm="warns",
        fixes=(
            Fix(
                text="Remove it, unless two runs must be equal bit for bit.",
                overrides={"train.deterministic": False},
                same_result=False,
            ),
        ),
    )


FINDING = FindingRule(name="deterministic", look=look)
