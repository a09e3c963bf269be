"""Micro-batches are small for the GPU, which has room for larger ones."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule
from flatout.measure.findings.idle_gpu import fixes_for_overhead
from flatout.measure.instruments.evidence import Evidence

LOW_MFU = 0.2
"""Share of the peak below which a small micro-batch is the likely cause."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the GPU is far from its roof and a larger micro-batch fits."""
    config, mfu = evidence.config, evidence.roof.mfu
    if not evidence.on_gpu or config is None or mfu is None or mfu > LOW_MFU:
        return None
    rows, most = config.batch.rows_per_device, evidence.memory.rows_that_fit
    if not isinstance(rows, int) or most is None or most < 2 * rows:
        return None
    if (config.batch.accumulate or 1) < 2:
        return None
    host = evidence.share(evidence.phases.host_s) or 0.0
    fixes = tuple(
        fix
        for fix in fixes_for_overhead(evidence, host)
        if "batch.rows_per_device" in fix.overrides
    )
    return Finding(
        verdict=f"Micro-batches of {rows} rows reach {mfu:.0%} of the GPU's peak; {most} rows fit.",
        harm="slows",
        figures={"mfu": mfu, "rows_per_device": rows, "rows_that_fit": most},
        share=host or None,
        fixes=fixes,
    )


FINDING = FindingRule(name="small-batch", look=look, unless=("slow-data", "slow-disk", "host-sync"))
