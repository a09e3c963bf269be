"""torch.compile failed, so that the run is slower than it should be, or cannot start."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

READ = Fix(
    text="Read the error: on a CPU, torch.compile needs a C++ compiler (`apt install g++`); in "
    "your own model, it names the line that it cannot compile."
)
LEAVE_OFF = Fix(
    text="Or leave it off, which saves the failed attempt at every start.",
    overrides={"speedups": "-compile"},
)


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when compiling failed."""
    failure = evidence.failure
    advice = (READ,) if evidence.config is None else (READ, LEAVE_OFF)
    if failure is not None and failure.kind == "compile":
        return Finding(verdict=failure.message, harm="fails", site=failure.site, fixes=advice)
    if evidence.compile_fallback is None:
        return None
    return Finding(
        verdict=f"torch.compile failed, and the run continues without it: "
        f"{evidence.compile_fallback.rstrip('.')}.",
        harm="slows",
        site=evidence.site("recompile"),
        fixes=advice,
    )


FINDING = FindingRule(name="compile-failure", look=look)
