"""The GPU runs below its clock rate: power cap, heat, power supply."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

CAPPED = 0.95
"""Power limit, as a share of the default, below which it counts as lowered."""
SLOWER = 0.9
"""Share of the highest clock rate below which a power cap counts: all large GPUs reach it."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the driver reports that the GPU is slowed down."""
    gpu = evidence.gpu
    if gpu is None:
        return None
    reasons = gpu.slowed_by or ()
    lowered = gpu.power_limit_share is not None and gpu.power_limit_share < CAPPED
    only_power = reasons == ("its power cap",)
    if only_power and not lowered and (gpu.clock_share or 1.0) >= SLOWER:
        reasons = ()
    if not reasons and not lowered:
        return None
    figures = {
        "clock_share": gpu.clock_share,
        "power_limit_share": gpu.power_limit_share,
        "temperature_c": gpu.temperature_c,
    }
    if not reasons:
        return Finding(
            verdict=f"The GPU's power limit is lowered to {gpu.power_limit_share:.0%}.",
            harm="warns",
            figures=figures,
            fixes=(Fix(text="Raise it with `nvidia-smi -pl WATTS`, if you may."),),
        )
    share = None if gpu.clock_share is None else max(1 - gpu.clock_share, 0.0)
    clock = "" if gpu.clock_share is None else f" It runs at {gpu.clock_share:.0%} of its clock."
    return Finding(
        verdict=f"The GPU is slowed down by {' and '.join(reasons)}.{clock}",
        harm="slows",
        figures=figures,
        share=share,
        fixes=(
            Fix(
                text="Improve its cooling or airflow."
                if any("heat" in reason for reason in reasons)
                else "Raise its power limit with `nvidia-smi -pl WATTS`, if you may.",
            ),
        ),
    )


FINDING = FindingRule(name="throttling", look=look)
