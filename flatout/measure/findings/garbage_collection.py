"""Python's garbage collector takes a noticeable share of each step."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix, speedup_fixes
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.03
"""Share of the step from which it is a finding."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when collecting garbage takes time."""
    seconds, found = evidence.phases.gc_s, evidence.counts
    share = evidence.share(seconds)
    if share is None or seconds is None or share < WORTH_TELLING:
        return None
    site = evidence.site("gc")
    called = site is not None and "collect" in site.text
    runs = found.collections
    often = f" in {runs:.2g} collections" if runs else ""
    fixes = []
    if called and site is not None:
        fixes.append(
            Fix(
                text=f"Remove the call at {site.describe()}, or make it every few hundred steps.",
                gain=share,
                gain_from="the time of the collector",
            )
        )
    fixes += speedup_fixes(
        evidence,
        "gc",
        "Collect at fixed steps only",
        gain=share,
        gain_from="the time of the collector",
    )
    if evidence.config is None:
        fixes.append(
            Fix(
                text="Call gc.freeze() and gc.disable() before the loop, and gc.collect() every "
                "few hundred steps.",
                gain=share,
                gain_from="the time of the collector",
            )
        )
    return Finding(
        verdict=f"Python's garbage collector takes {share:.0%} of each step{often}.",
        harm="slows",
        figures={
            "gc_ms": 1e3 * seconds,
            "collections_per_step": runs,
            "full_collections_per_step": found.full_collections,
        },
        share=share,
        site=site,
        fixes=tuple(fixes),
    )


FINDING = FindingRule(
    name="garbage-collection",
    look=look,
    unless=("recompiles",),  # torch.compile collects garbage
)
