"""Logging and callbacks take a noticeable share of each step."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix, speedup_fixes
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.05
"""Share of the step from which it is a finding."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when logging takes time."""
    seconds = evidence.phases.logging_s
    share = evidence.share(seconds)
    if share is None or seconds is None or share < WORTH_TELLING:
        return None
    site, config, fixes = evidence.site("logging"), evidence.config, []
    if site is not None:
        fixes.append(
            Fix(
                text=f"Do less at {site.describe()}, or do it every few steps.",
                gain=share,
                gain_from="the time of logging",
            )
        )
    late = "Read figures one step late"
    fixes += speedup_fixes(evidence, "readback", late, gain=share, gain_from="the time of logging")
    if config is not None and config.log.every < 10:
        fixes.append(
            Fix(
                text="Write fewer records: log.every=10.",
                overrides={"log.every": 10},
                gain=share * (1 - config.log.every / 10),
                gain_from="fewer records",
            )
        )
    if not fixes:
        fixes.append(Fix(text="Log less often.", gain=share, gain_from="the time of logging"))
    return Finding(
        verdict=f"Logging and callbacks take {share:.0%} of each step.",
        harm="slows",
        figures={"logging_ms": 1e3 * seconds},
        share=share,
        site=site,
        fixes=tuple(fixes),
    )


FINDING = FindingRule(name="slow-logging", look=look)
