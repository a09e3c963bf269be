"""Other processes use the same GPU."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

MIN_GIB = 0.5
"""Memory below which another process only shows something, such as a desktop."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when others hold memory of the GPU."""
    gpu = evidence.gpu
    if gpu is None or not gpu.other_processes or (gpu.other_memory_gib or 0.0) < MIN_GIB:
        return None
    count = gpu.other_processes
    return Finding(
        verdict=f"{count} other process{'es' if count > 1 else ''} on this GPU hold"
        f"{'' if count > 1 else 's'} {gpu.other_memory_gib:.1f} GiB of its memory, and may take "
        "its time.",
        harm="warns",
        figures={"processes": count, "memory_gib": gpu.other_memory_gib},
        fixes=(Fix(text="End them (`nvidia-smi` lists them), or use another GPU."),),
    )


FINDING = FindingRule(name="gpu-shared", look=look)
