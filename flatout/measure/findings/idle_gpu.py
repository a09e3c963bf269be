"""The GPU idles while the host prepares its work."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.15
"""Share of the step from which idling is a finding."""
LOW_UTILISATION = 0.6
"""Utilisation below which a recorded run counts as idle; its steps were not divided."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the GPU idles for a reason that no other rule names."""
    if not evidence.on_gpu:
        return None
    share = evidence.share(evidence.phases.host_s)
    used = evidence.gpu.utilisation if evidence.gpu is not None else None
    if share is None and used is not None and used < LOW_UTILISATION:
        share = 1 - used
    if share is None or share < WORTH_TELLING:
        return None
    return Finding(
        verdict=f"The GPU idles {share:.0%} of each step, while Python prepares its work.",
        harm="slows",
        figures={
            "kernels_per_step": evidence.counts.ops,
            "idle_ms": 1e3 * share * (evidence.step_s or 0.0) or None,
            "utilisation": used,
        },
        share=share,
        site=evidence.site("compute") or evidence.site("python"),
        fixes=fixes_for_overhead(evidence, share),
    )


def fixes_for_overhead(evidence: Evidence, share: float) -> tuple[Fix, ...]:
    """Return what makes the host's work per step smaller."""
    if evidence.config is None:
        return (
            Fix(
                text="Compile the model (`torch.compile`), or do more work per step.",
                gain=share,
                gain_from="the step without the idle time",
                cost_s=60.0,
            ),
        )
    on, fixes = evidence.speedups or (), []
    accumulate = evidence.config.batch.accumulate or 1
    if "compile" not in on:
        fixes.append(
            Fix(
                text="Compile the model: add the speedup compile.",
                overrides={"speedups": "+compile"},
                gain=share,
                gain_from="the step without the host's overhead",
                cost_s=60.0,
            )
        )
    rows, most = evidence.config.batch.rows_per_device, evidence.memory.rows_that_fit
    if accumulate > 1 and isinstance(rows, int) and (most is None or most >= 2 * rows):
        more = next(each for each in range(2, accumulate + 1) if accumulate % each == 0)
        fixes.append(
            Fix(
                text=f"Use a larger micro-batch: batch.rows_per_device={more * rows} (the tokens "
                "per step stay the same).",
                overrides={
                    "batch.tokens_per_step": evidence.config.batch.tokens_per_step,
                    "batch.rows_per_device": more * rows,
                    "batch.accumulate": None,
                },
                gain=share * (1 - 1 / more),
                gain_from="the host's overhead, shared by more rows",
            )
        )
    if not fixes:
        fixes.append(Fix(text="Use larger micro-batches, or a larger model per step."))
    return tuple(fixes)


FINDING = FindingRule(
    name="idle-gpu",
    look=look,
    unless=(
        "slow-data",
        "slow-disk",
        "host-sync",
        "tiny-kernels",
        "recompiles",
        "garbage-collection",
        "environment",
        "empty-cache",
        "pageable-copies",
        "small-batch",
    ),
)
