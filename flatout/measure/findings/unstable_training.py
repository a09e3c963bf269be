"""The loss diverges, jumps or rises again, or float16 keeps overflowing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

MIN_RECORDS = 24
"""With fewer losses, only those that are not finite count."""
JUMP_DEVIATIONS, JUMP_SHARE = 10.0, 0.25
"""A jump exceeds this many deviations of the loss, and this share of its level."""
RISEN_SHARE = 0.3
"""Share of its fall that the loss must have lost again."""
MOST_SKIPPED = 0.05
"""Share of updates that float16 may skip."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when training is unstable."""
    failure, losses = evidence.failure, evidence.losses or ()
    lost = next((step for step, loss in losses if not math.isfinite(loss)), None)
    if failure is not None and failure.kind == "diverged":
        return _finding(evidence, "fails", failure.message)
    if lost is not None:
        return _finding(evidence, "fails", f"The loss is not a number from step {lost}.")
    values = [loss for _, loss in losses]
    jump = worst_jump(values)
    if jump is not None:
        number, size = jump
        step = losses[number][0]
        return _finding(
            evidence, "spoils", f"The loss jumps by {size:.3g} at step {step}.", jump=size
        )
    if has_risen(values):
        best = min(range(len(values)), key=values.__getitem__)
        return _finding(
            evidence,
            "spoils",
            f"The loss rises again: {values[best]:.3g} at step {losses[best][0]}, and "
            f"{statistics.median(values[-len(values) // 8 :]):.3g} at the end.",
        )
    skipped, steps = evidence.skipped_steps, evidence.steps
    if skipped and steps and skipped / steps > MOST_SKIPPED:
        return _finding(
            evidence,
            "spoils",
            f"float16 overflowed, and {skipped} of {steps} updates were skipped.",
        )
    return None


def worst_jump(values: Sequence[float]) -> tuple[int, float] | None:
    """Return index and size of the largest jump above the losses before it, or None.

    The first eighth of the run does not count: the loss falls fast there.
    """
    if len(values) < MIN_RECORDS:
        return None
    worst: tuple[int, float] | None = None
    for index in range(max(len(values) // 8, 8), len(values)):
        before = values[max(index - 16, 0) : index]
        level = statistics.median(before)
        deviation = 1.4826 * statistics.median(abs(value - level) for value in before)
        size = values[index] - level
        if size > max(JUMP_DEVIATIONS * deviation, JUMP_SHARE * abs(level)) and (
            worst is None or size > worst[1]
        ):
            worst = (index, size)
    return worst


def has_risen(values: Sequence[float]) -> bool:
    """Return whether the loss ends well above its lowest level."""
    if len(values) < MIN_RECORDS:
        return False
    part = len(values) // 8
    levels = [
        statistics.median(values[i : i + part]) for i in range(0, len(values) - part + 1, part)
    ]
    lowest, fall = min(levels), levels[0] - min(levels)
    return levels[-1] - lowest > RISEN_SHARE * fall and levels[-1] > 1.05 * lowest


def _finding(evidence: Evidence, harm: str, verdict: str, **figures: float) -> Finding:
    norms = [norm for _, norm in evidence.grad_norms or () if math.isfinite(norm)]
    return Finding(
        verdict=verdict,
        harm="fails" if harm == "fails" else "spoils",
        figures={
            **figures,
            "optim.lr": evidence.setting("optim.lr"),
            "schedule.warmup": evidence.setting("schedule.warmup"),
            "optim.clip": evidence.setting("optim.clip"),
            "largest_grad_norm": max(norms, default=None),
            "median_grad_norm": statistics.median(norms) if norms else None,
        },
        fixes=_fixes(evidence),
    )


def _fixes(evidence: Evidence) -> tuple[Fix, ...]:
    config = evidence.config
    if config is None:
        return (
            Fix(text="Lower the learning rate, or lengthen its warm-up.", same_result=False),
            Fix(text="Clip the gradient's norm at 1.", same_result=False),
        )
    lr = config.optim.lr
    fixes = [
        Fix(
            text=f"Lower the learning rate: optim.lr={lr / 3:.2g}.",
            overrides={"optim.lr": float(f"{lr / 3:.2g}")},
            same_result=False,
        )
    ]
    if not config.optim.clip:
        fixes.insert(
            0,
            Fix(
                text="Clip the gradient's norm: optim.clip=1.",
                overrides={"optim.clip": 1.0},
                same_result=False,
            ),
        )
    if config.schedule.warmup == 0:
        fixes.append(
            Fix(
                text="Warm the learning rate up: schedule.warmup=0.02.",
                overrides={"schedule.warmup": 0.02},
                same_result=False,
            )
        )
    if config.train.precision == "fp16":
        fixes.append(
            Fix(
                text="Use bf16, which has the range of fp32: train.precision=bf16.",
                overrides={"train.precision": "bf16"},
                same_result=False,
            )
        )
    return tuple(fixes)


FINDING = FindingRule(name="unstable-training", look=look)
