"""The allocator holds much more GPU memory than the tensors need."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

RATIO = 1.3
"""Reserved memory, as a multiple of the tensors', from which it is a finding."""
FULL = 0.8
"""Share of the GPU's memory below which it does no harm."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the memory is fragmented and nearly full."""
    memory = evidence.memory
    held, used, total = memory.reserved_gib, memory.peak_gib, memory.total_gib
    if not evidence.on_gpu or held is None or not used or not total:
        return None
    setting = (evidence.host.environment or {}).get("PYTORCH_ALLOC_CONF", "")
    if held < RATIO * used or held < FULL * total or "expandable_segments:True" in setting:
        return None
    return Finding(
        verdict=f"The allocator holds {held:.1f} GiB for tensors of {used:.1f} GiB: the memory is "
        "fragmented.",
        harm="warns",
        figures={"reserved_gib": held, "peak_gib": used, "total_gib": total},
        fixes=(Fix(text="Set PYTORCH_ALLOC_CONF=expandable_segments:True."),),
    )


FINDING = FindingRule(name="fragmentation", look=look)
