"""Quality: training is unstable."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from flatout.measure.diagnose.diagnosis import Finding, Fix, Harm, fix, rule
from flatout.measure.steps.evidence import Evidence

MIN_RECORDS = 24
"""With fewer losses, only those that are not finite count."""
JUMP_DEVIATIONS, JUMP_SHARE = 10.0, 0.25
"""A jump exceeds this many deviations of the loss, and this share of its level."""
MIN_LASTING = 8
"""Losses, or an eighth of the run, of which most must stay above a jump's limit for it to last. An
outlier of the data passes with its batch, and what it does to the weights within a few steps.
"""
RISEN_SHARE = 0.3
"""Share of its fall that the loss must have lost again."""
MIN_RISE = 2.0
"""Times the usual difference of two losses that it must exceed, which is noise."""
NOISE_SHARE, NOISE = 0.01, 1e-6
"""Changes of the loss that mean nothing: the share of its first values, and at least this."""
MOST_SKIPPED = 0.05
"""Share of updates that float16 may skip."""


@rule()
def unstable_training(evidence: Evidence) -> Finding | None:
    """The loss diverges, jumps or rises again, or float16 keeps overflowing.

    A jump after which the loss returns to its level is a warning: where batches have few rows, or
    rows that differ much, single losses are far above the others in stable training too. A level
    that stays up is lost progress.
    """
    diverged, losses = evidence.failed("diverged"), evidence.losses or ()
    lost = next((step for step, loss in losses if not math.isfinite(loss)), None)
    values = [loss for _, loss in losses]
    skipped, steps = evidence.skipped_steps, evidence.steps
    harm: Harm = "fails" if diverged is not None or lost is not None else "spoils"
    # a loss of both signs is a difference, as of rewards, whose level means nothing
    judged = [] if min(values, default=0.0) < 0 < max(values, default=0.0) else values
    jump = _worst_jump(judged) if lost is None else None
    if diverged is not None:
        verdict = diverged.message
    elif lost is not None:
        verdict = f"The loss is not a number from step {lost}."
    elif jump is not None and jump[0]:
        verdict = f"The loss jumps by {jump[1]:.3g} at step {losses[jump[2]][0]}, and stays up."
    elif _has_risen(judged):
        best = min(range(len(values)), key=values.__getitem__)
        verdict = (
            f"The loss rises again: {values[best]:.3g} at step {losses[best][0]}, and "
            f"{statistics.median(values[-len(values) // 8 :]):.3g} at the end."
        )
    elif skipped and steps and skipped / steps > MOST_SKIPPED:
        verdict = f"float16 overflowed, and {skipped} of {steps} updates were skipped."
    elif jump is not None:
        verdict, harm = f"The loss jumps by {jump[1]:.3g} at step {losses[jump[2]][0]}.", "warns"
    else:
        return None
    norms = [norm for _, norm in evidence.grad_norms or () if math.isfinite(norm)]
    return Finding(
        verdict=verdict,
        harm=harm,
        figures={
            "jump": jump and jump[1],
            "optim.lr": evidence.setting("optim.lr"),
            "schedule.warmup": evidence.setting("schedule.warmup"),
            "optim.clip": evidence.setting("optim.clip"),
            "largest_grad_norm": max(norms, default=None),
            "median_grad_norm": statistics.median(norms) if norms else None,
        },
        fixes=_calmer(evidence),
    )


def _worst_jump(values: Sequence[float]) -> tuple[bool, float, int] | None:
    """Return whether the largest jump above the losses before it lasts, its size and index.

    Those that last come first. None without a jump. The first eighth of the run does not count: the
    loss falls fast there.
    """
    if len(values) < MIN_RECORDS:
        return None
    found = []
    least = _noise_floor(values)
    for index in range(max(len(values) // 8, 8), len(values)):
        before = values[max(index - 16, 0) : index]
        level = statistics.median(before)
        deviation = 1.4826 * statistics.median(abs(value - level) for value in before)
        limit = level + max(JUMP_DEVIATIONS * deviation, JUMP_SHARE * abs(level), least)
        if values[index] > limit:
            after = values[index : index + max(len(values) // 8, MIN_LASTING)]
            lasts = len(after) > 2 and statistics.median(after) > limit
            found.append((lasts, values[index] - level, index))
    return max(found, default=None)


def _noise_floor(values: Sequence[float]) -> float:
    """Return the change of a loss that means nothing, as that of one which has reached zero."""
    return max(NOISE_SHARE * abs(statistics.median(values[:8])), NOISE)


def _has_risen(values: Sequence[float]) -> bool:
    """Return whether the loss ends well above its lowest level."""
    if len(values) < MIN_RECORDS:
        return False
    part = len(values) // 8
    levels = [
        statistics.median(values[i : i + part]) for i in range(0, len(values) - part + 1, part)
    ]
    lowest, fall = min(levels), levels[0] - min(levels)
    noise = statistics.median(abs(b - a) for a, b in itertools.pairwise(values))
    rise = levels[-1] - lowest
    return rise > max(
        RISEN_SHARE * fall, 0.05 * abs(lowest), MIN_RISE * noise, _noise_floor(values)
    )


def _calmer(evidence: Evidence) -> list[Fix]:
    """Return settings with which training is more stable."""
    config = evidence.config
    if config is None:
        texts = (
            "Lower the learning rate, or lengthen its warm-up.",
            "Clip the gradient's norm at 1.",
        )
        return [fix(text, same_result=False) for text in texts]
    changes: list[tuple[str, str, str | float]] = []
    if not config.optim.clip:
        changes.append(("Clip the gradient's norm", "optim.clip", 1.0))
    lower = float(f"{config.optim.lr / 3:.2g}")
    changes.append(("Lower the learning rate", "optim.lr", lower))
    if config.schedule.warmup == 0:
        changes.append(("Warm the learning rate up", "schedule.warmup", 0.02))
    if config.train.precision == "fp16":
        changes.append(("Use bf16, which has the range of fp32", "train.precision", "bf16"))
    shown = (value if isinstance(value, str) else f"{value:.2g}" for *_, value in changes)
    return [
        fix(f"{what}: {key}={text}.", overrides={key: value}, same_result=False)
        for (what, key, value), text in zip(changes, shown, strict=True)
    ]
