"""The GPU spends much of each step on elementwise work that torch.compile would fuse."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.35
"""Share of the step from which it is a finding."""
FUSED = 0.5
"""Share of memory traffic that fusing is assumed to save: each pass reads and writes once less."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when memory-bound operations dominate an uncompiled run on a GPU."""
    share = evidence.share(evidence.phases.memory_bound_s)
    compiled = any(name.startswith("compile") for name in evidence.speedups or ())
    if not evidence.on_gpu or share is None or share < WORTH_TELLING or compiled:
        return None
    kinds = sorted(evidence.kernels or (), key=lambda kind: -kind.seconds)
    return Finding(
        verdict=f"{share:.0%} of each step goes into operations that move memory and hardly "
        "compute.",
        harm="slows",
        figures={f"{kind.kind}_ms": 1e3 * kind.seconds for kind in kinds[:5]},
        share=share * FUSED,
        site=evidence.site("compute"),
        fixes=(
            Fix(
                text="Compile the model, which fuses them: add the speedup compile."
                if evidence.config is not None
                else "Compile the model, which fuses them: torch.compile(model).",
                overrides={} if evidence.config is None else {"speedups": "+compile"},
                gain=share * FUSED,
                gain_from="half of their time; fused operations read and write memory once",
                cost_s=60.0,
            ),
        ),
    )


FINDING = FindingRule(name="memory-bound", look=look)
