"""Saves block the loop for a noticeable share of the run."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix, speedup_fixes
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.05
"""Share of the run from which saves are a finding."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when saves take too much of the run."""
    seconds = evidence.phases.checkpoint_s
    share = evidence.share(seconds)
    if share is None or seconds is None or share < WORTH_TELLING:
        return None
    return Finding(
        verdict=f"Saving checkpoints takes {share:.0%} of the run.",
        harm="slows",
        figures={"save_ms_per_step": 1e3 * seconds, "step_ms": 1e3 * (evidence.step_s or 0.0)},
        share=share,
        site=evidence.site("save"),
        fixes=_fixes(evidence, share),
    )


def _fixes(evidence: Evidence, share: float) -> tuple[Fix, ...]:
    config = evidence.config
    if config is None:
        background = ", or copy the state and write it in a background thread"
        return (
            Fix(
                text=f"Save less often{background if evidence.on_gpu else ''}.",
                gain=share,
                gain_from="the time of the saves",
            ),
        )
    fixes: list[Fix] = []
    if evidence.on_gpu:  # on a CPU, the writing thread takes the cores that train
        fixes += speedup_fixes(
            evidence,
            "state_saver",
            "Write checkpoints in the background",
            gain=0.8 * share,
            gain_from="the time of the saves, without the copy that remains",
        )
    factor = max(round(share / 0.01), 2)
    for key in ("every_steps", "every_minutes", "every_epochs"):
        every = getattr(config.checkpoint, key)
        if every is not None:
            fixes.append(
                Fix(
                    text=f"Save less often: checkpoint.{key}={every * factor:g}.",
                    overrides={f"checkpoint.{key}": every * factor},
                    gain=share * (1 - 1 / factor),
                    gain_from=f"1 save instead of {factor}",
                )
            )
    fixes.append(Fix(text="Set checkpoint.dir to a faster disk."))
    return tuple(fixes)


FINDING = FindingRule(name="slow-save", look=look)
