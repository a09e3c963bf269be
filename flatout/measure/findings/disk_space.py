"""The disk is too small for the checkpoints of the run."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the checkpoints do not fit."""
    free, needed = evidence.host.disk_free_gib, evidence.host.disk_needed_gib
    if free is None or needed is None or needed <= free:
        return None
    fixes = [Fix(text="Free space, or set checkpoint.dir to a larger disk.")]
    if evidence.config is not None:
        overrides: dict[str, int | None] = {"checkpoint.keep": 1}
        if evidence.config.checkpoint.keep_every is not None:
            overrides["checkpoint.keep_every"] = None
        text = " ".join(f"{key}={value or 'null'}" for key, value in overrides.items())
        fixes.append(Fix(text=f"Keep fewer: {text}.", overrides=overrides))
    return Finding(
        verdict=f"The checkpoints need {needed:.1f} GiB, and the disk has {free:.1f} GiB free.",
        harm="fails",
        figures={"needed_gib": needed, "free_gib": free},
        fixes=tuple(fixes),
    )


FINDING = FindingRule(name="disk-space", look=look)
