"""torch.compile compiles again and again after the warm-up."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.03
"""Share of the step from which compiling is a finding."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when steps compile."""
    seconds, graphs = evidence.phases.compile_s, evidence.counts.recompiles
    share = evidence.share(seconds)
    if share is None or seconds is None or share < WORTH_TELLING or not graphs:
        return None
    fixes = [
        Fix(
            text="Give every step the same shapes and dtypes (pad the last batch), or mark the "
            "dimension that changes with torch._dynamo.mark_dynamic.",
            gain=share,
            gain_from="the step without compiling",
        )
    ]
    if evidence.config is not None:
        fixes.append(
            Fix(
                text="Or leave compile off: speedups=auto,-compile.",
                overrides={"speedups": "-compile"},
            )
        )
    return Finding(
        verdict=f"torch.compile takes {share:.0%} of each step: it compiles {graphs:.2g} graphs "
        "per step after the warm-up.",
        harm="slows",
        figures={
            "compile_ms": 1e3 * seconds,
            "graphs_per_step": graphs,
            "reason": next(iter(evidence.recompile_reasons), None),
        },
        share=share,
        site=evidence.site("recompile"),
        fixes=tuple(fixes),
    )


FINDING = FindingRule(name="recompiles", look=look)
