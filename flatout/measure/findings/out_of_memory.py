"""The run needs more memory than the device has, or ended for lack of it."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

CLOSE = 0.92
"""Share of the memory from which an estimate is a warning: it is not exact."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when the run failed, cannot fit, or is close to the limit."""
    memory, failure = evidence.memory, evidence.failure
    failed = failure is not None and failure.kind in ("out-of-memory", "killed")
    need, have = memory.estimated_gib, memory.free_gib
    share = need / have if need is not None and have else None
    if not failed and (share is None or share < CLOSE):
        return None
    if failed and failure is not None:
        verdict, harm = failure.message, "fails"
    elif share is not None and share > 1:
        verdict = f"The run needs about {need:.1f} GiB, and {have:.1f} GiB are available."
        harm = "fails"
    else:
        verdict = f"The run needs about {need:.1f} of {have:.1f} GiB: it may run out of memory."
        harm = "warns"
    parts = memory.estimated_parts_gib or {}
    return Finding(
        verdict=verdict,
        harm="fails" if harm == "fails" else "warns",
        figures={
            "estimated_gib": need,
            "available_gib": have,
            **{f"{name}_gib": size for name, size in parts.items()},
            "rows_that_fit": memory.rows_that_fit,
        },
        site=failure.site if failure else None,
        fixes=_fixes(evidence),
    )


def _fixes(evidence: Evidence) -> tuple[Fix, ...]:
    fixes: list[Fix] = []
    config, failure = evidence.config, evidence.failure
    rows = smaller_micro_batch(evidence)
    if rows is not None and config is not None:
        fixes.append(
            Fix(
                text=f"Set batch.rows_per_device={rows}; the tokens per step stay the same.",
                overrides={
                    "batch.tokens_per_step": config.batch.tokens_per_step,
                    "batch.rows_per_device": rows,
                    "batch.accumulate": None,
                },
            )
        )
    if config is not None and "checkpointing" not in (evidence.speedups or ()):
        fixes.append(
            Fix(
                text="Add the speedup checkpointing: it recomputes the blocks' activations, for "
                "about a third more computation.",
                overrides={"speedups": "+checkpointing"},
            )
        )
    if failure is not None and failure.fix is not None and not fixes:
        fixes.append(Fix(text=failure.fix))
    if not fixes:
        fixes.append(Fix(text="Use a smaller batch, shorter sequences or a smaller model."))
    return tuple(fixes)


def smaller_micro_batch(evidence: Evidence) -> int | None:
    """Return the most rows below the present ones that fit and divide a step, or None.

    After a failure, at most half of the present ones: the estimate was too low.
    """
    config, most = evidence.config, evidence.memory.rows_that_fit
    if config is None or config.batch.rows_per_device == "auto":
        return None
    rows = int(config.batch.rows_per_device)
    has_failed = evidence.failure is not None
    most = min(most if most is not None else rows // 2, rows // 2 if has_failed else rows - 1)
    per_rank = (config.batch.tokens_per_step or 0) // config.data.seq_len // evidence.world_size
    return next((each for each in range(most, 0, -1) if per_rank % each == 0), None)


FINDING = FindingRule(name="out-of-memory", look=look)
