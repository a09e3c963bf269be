"""Batches are copied to the GPU from memory that is not pinned, so that the host waits."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.02
"""Share of the step from which they are a finding."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when unpinned copies take time."""
    found = evidence.counts
    if not evidence.on_gpu or not found.pageable_copies or found.pageable_copy_s is None:
        return None
    share = evidence.share(found.pageable_copy_s)
    if share is None or share < WORTH_TELLING:
        return None
    rate = (found.pageable_copy_bytes or 0.0) / found.pageable_copy_s / 1e9
    fix = Fix(
        text="Use DataLoader(pin_memory=True), and copy with .to(device, non_blocking=True).",
        gain=share,
        gain_from="the time of the copies, which pinned ones hide",
    )
    if evidence.config is not None and "prefetch" not in (evidence.speedups or ()):
        fix = Fix(
            text="Copy from pinned memory in the background: add the speedup prefetch.",
            overrides={"speedups": "+prefetch"},
            gain=share,
            gain_from="the time of the copies, which pinned ones hide",
        )
    return Finding(
        verdict=f"{share:.0%} of each step copies batches to the GPU from memory that is not "
        "pinned.",
        harm="slows",
        figures={
            "copies_per_step": found.pageable_copies,
            "copies_ms": 1e3 * found.pageable_copy_s,
            "gb_per_s": rate or None,
        },
        share=share,
        site=evidence.site("copy"),
        fixes=(fix,),
    )


FINDING = FindingRule(name="pageable-copies", look=look)
