"""The loop empties the allocator's cache again and again."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

OFTEN = 0.4
"""Calls per step from which it is a finding."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when steps call torch.cuda.empty_cache()."""
    calls, seconds = evidence.counts.empty_cache, evidence.counts.empty_cache_s
    if calls is None or calls < OFTEN:
        return None
    share = evidence.share(seconds) if evidence.on_gpu else None
    site = evidence.site("empty-cache")
    where = f" at {site.describe()}" if site is not None else ""
    effect = (
        "it waits for the GPU, and memory must be requested anew"
        if evidence.on_gpu
        else "on a GPU that makes the host wait"
    )
    return Finding(
        verdict=f"Each step calls torch.cuda.empty_cache(){where}: {effect}.",
        harm="slows" if evidence.on_gpu else "warns",
        figures={
            "calls_per_step": calls,
            "seconds_per_step": seconds if evidence.on_gpu else None,
        },
        share=share,
        site=site,
        fixes=(
            Fix(
                text="Remove the call. Against fragmentation, set "
                "PYTORCH_ALLOC_CONF=expandable_segments:True.",
                gain=share,
                gain_from=None if share is None else "the time of the calls",
            ),
        ),
    )


FINDING = FindingRule(name="empty-cache", look=look)
