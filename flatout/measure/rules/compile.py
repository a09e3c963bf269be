"""Compiling: torch.compile fails, or compiles again and again."""

from __future__ import annotations

from flatout.measure.diagnose.diagnosis import Finding, fix, ms, rule
from flatout.measure.steps.evidence import Evidence

OFF = {"speedups": "-compile"}
SLOW_COMPILING = 0.03
"""Share of the step from which compiling is a finding."""


@rule()
def compile_failure(evidence: Evidence) -> Finding | None:
    """torch.compile fails, so the run is slower or cannot start."""
    failure, fallback = evidence.failed("compile"), evidence.compile_fallback
    if failure is None and fallback is None:
        return None
    fixes = [
        fix(
            "Read the error: on a CPU, torch.compile needs a C++ compiler (`apt install g++`). In "
            "your own model, it names the line that it cannot compile."
        )
    ]
    if evidence.config is not None:
        text = "Or turn it off, which saves the failed attempt at every start."
        fixes.append(fix(text, overrides=OFF))
    if failure is not None:
        return Finding(verdict=failure.message, harm="fails", site=failure.site, fixes=fixes)
    reason = (fallback or "").rstrip(".")
    return Finding(
        verdict=f"torch.compile failed, and the run continues without it: {reason}.",
        site=evidence.site("recompile"),
        fixes=fixes,
    )


@rule()
def recompiles(evidence: Evidence) -> Finding | None:
    """torch.compile keeps compiling after the warm-up."""
    seconds, graphs = evidence.phases.compile_s, evidence.counts.recompiles
    share = evidence.lost(seconds, SLOW_COMPILING)
    if share is None or not graphs:
        return None
    fixes = [
        fix(
            "Give every step the same shapes and dtypes (pad the last batch), or mark the "
            "dimension that changes with torch._dynamo.mark_dynamic.",
            share,
            "the step without compiling",
        )
    ]
    if evidence.config is not None:
        fixes.append(fix("Or turn compile off: speedups=auto,-compile.", overrides=OFF))
    return Finding(
        verdict=f"torch.compile takes {share:.0%} of each step: it compiles {graphs:.2g} graphs "
        "per step after the warm-up.",
        figures={
            "compile_ms": ms(seconds),
            "graphs_per_step": graphs,
            "reason": next(iter(evidence.recompile_reasons), None),
        },
        share=share,
        site=evidence.site("recompile"),
        fixes=fixes,
    )
