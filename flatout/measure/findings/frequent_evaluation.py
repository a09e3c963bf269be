"""Evaluations take a noticeable share of the run."""

from __future__ import annotations

import math

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

WORTH_TELLING = 0.2
"""Share of the run from which they are a finding."""
ENOUGH = 0.05
"""Share of the run that the fix leaves to them."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when evaluations take too much of the run."""
    seconds, config = evidence.phases.evaluation_s, evidence.config
    share = evidence.share(seconds)
    if share is None or seconds is None or share < WORTH_TELLING:
        return None
    fixes = []
    if config is not None and config.train.eval_every:
        factor = math.ceil(share * (1 - ENOUGH) / (ENOUGH * max(1 - share, 1e-6)))
        fixes += _less_often(config.train.eval_every, factor, share, evidence.planned_steps)
        tokens = (evidence.data.val_tokens or 0) // factor
        if config.train.eval_tokens == "all" and tokens:
            fixes.append(
                Fix(
                    text=f"Or score a part of the validation text: train.eval_tokens={tokens}.",
                    overrides={"train.eval_tokens": tokens},
                    gain=share * (1 - 1 / factor),
                    gain_from=f"1/{factor} of the text",
                )
            )
    else:
        fixes.append(Fix(text="Evaluate less often, or on less text.", gain=share))
    return Finding(
        verdict=f"Evaluations take {share:.0%} of the run.",
        harm="slows",
        figures={
            "evaluation_ms_per_step": 1e3 * seconds,
            "train.eval_every": evidence.setting("train.eval_every"),
            "val_tokens": evidence.data.val_tokens,
        },
        share=share,
        site=evidence.site("evaluation"),
        fixes=tuple(fixes),
    )


def _less_often(every: int, factor: int, share: float, steps: int | None) -> list[Fix]:
    """Return the fix that evaluates less often: at least once, at the last step of the run."""
    rarer = every * factor if steps is None else min(every * factor, steps)
    if rarer <= every:
        return []
    fewer = rarer / every
    return [
        Fix(
            text=f"Evaluate less often: train.eval_every={rarer}.",
            overrides={"train.eval_every": rarer},
            gain=share * (1 - 1 / fewer),
            gain_from=f"1 evaluation instead of {round(fewer)}",
        )
    ]


FINDING = FindingRule(name="frequent-evaluation", look=look)
