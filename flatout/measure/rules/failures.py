"""Failures: the run ended, cannot start, or trains badly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

from flatout.measure.evidence import Evidence
from flatout.measure.rules import Found, Remedy, rule

MIN_LOSSES, MIN_OF_RISE = 24, 64
"""Fewest losses by which jumps, and rises, are judged: training may start with a rise, and the
levels of few losses are noise.
"""
JUMP_DEVIATIONS, JUMP_SHARE = 10.0, 0.25
"""A jump exceeds this many deviations of the loss, and this share of its level."""
MIN_LASTING = 8
"""Losses, or an eighth of the run, of which most must stay above a jump's limit for it to last. An
outlier of the data passes with its batch, and what it does to the weights within a few steps.
"""
RISEN_SHARE = 0.3
"""Share of its fall that the loss must have lost again."""
MIN_RISE = 3.0
"""Times the usual difference of two losses that it must exceed, which is noise."""
NOISE_SHARE, NOISE = 0.01, 1e-6
"""Changes of the loss that mean nothing: the share of its first values, and at least this."""
MOST_SKIPPED = 0.05
"""Share of updates that float16 may skip."""


@rule(site="failure")
def failure(evidence: Evidence) -> Found | None:
    """The run ends with an error, makes no progress, or cannot start: no data, no package."""
    ended = evidence.failed("error", "hang", "missing-package", "no-data")
    if ended is None:
        return None
    says = "The run fails at step {e.failure.step}: {e.failure.message}"
    if ended.kind != "error" or not ended.step:
        says = "{e.failure.message}"
    return "fails", says, (ended.fix and "{e.failure.fix}", "Look at the output of the run.")


@rule()
def unstable_training(evidence: Evidence) -> Found | None:
    """The loss diverges, jumps or rises again, or float16 keeps overflowing.

    A jump after which the loss returns to its level is a warning: where batches have few rows, or
    rows that differ much, single losses are far above the others in stable training too. A level
    that stays up is lost progress.
    """
    losses = evidence.losses or ()
    lost = next((step for step, loss in losses if not math.isfinite(loss)), None)
    values, jump, rise = [loss for _, loss in losses], (False, 0.0, 0), ""
    # a loss of both signs is a difference, as of rewards, whose level means nothing
    if lost is None and len(values) >= MIN_LOSSES and not min(values) < 0 < max(values):
        noise = max(NOISE_SHARE * abs(median(values[:8])), NOISE)
        jump, rise = _worst_jump(values, noise), _rise(values, noise)
    lasts, size, index = jump
    jumps = f"The loss jumps by {size:.3g} at step {losses[index][0] if size else 0}"
    overflows = (evidence.skipped_steps or 0) > MOST_SKIPPED * (evidence.steps or math.inf)
    found = (
        (evidence.failed("diverged") and "fails", "{e.failure.message}"),
        (lost is not None and "fails", f"The loss is not a number from step {lost}."),
        (lasts and "spoils", f"{jumps}, and stays up."),
        (rise and "spoils", f"The loss rises again: {rise}."),
        (
            overflows and "spoils",
            "float16 overflowed, and {e.skipped_steps} of {e.steps} updates were skipped.",
        ),
        (size and "warns", f"{jumps}."),
    )
    return *next((one for one in found if one[0]), found[0]), (calmer,)


def _worst_jump(values: Sequence[float], noise: float) -> tuple[bool, float, int]:
    """Return whether the largest jump above the losses before it lasts, its size and index.

    Those that last come first. The size is 0 without a jump. The first eighth of the run does not
    count: the loss falls fast there.
    """
    found, few = [], max(len(values) // 8, MIN_LASTING)
    for index in range(few, len(values)):
        before, after = values[max(index - 16, 0) : index], values[index : index + few]
        level = median(before)
        deviation = 1.4826 * median(abs(value - level) for value in before)
        limit = max(JUMP_DEVIATIONS * deviation, JUMP_SHARE * abs(level), noise)
        if after[0] > level + limit:
            lasts = len(after) > 2 and median(after) > level + limit
            found.append((lasts, after[0] - level, index))
    return max(found, default=(False, 0.0, 0))


def _rise(values: Sequence[float], noise: float) -> str:
    """Return the lowest and the last of eight levels, if the last is well above the lowest."""
    if len(values) < MIN_OF_RISE:
        return ""
    part = len(values) // 8
    first, *_, last = levels = [median(values[-n * part :][:part]) for n in range(8, 0, -1)]
    lowest, usual = min(levels), median(abs(b - a) for a, b in itertools.pairwise(values))
    limit = max(RISEN_SHARE * (first - lowest), 0.05 * abs(lowest), MIN_RISE * usual, noise)
    return f"from {lowest:.3g} to {last:.3g} at the end" if last - lowest > limit else ""


def calmer(evidence: Evidence, _: float) -> Remedy:
    """Return the settings with which training is more stable."""
    config, losses = evidence.config, evidence.losses or ()
    if losses and losses[0][0] <= 1 and not math.isfinite(losses[0][1]):
        return "Look for what is not a number in the data or the model: no update had been made."
    if config is None:
        return "Lower the learning rate, lengthen its warm-up, and clip the gradient's norm at 1."
    if config.train.precision == "fp16":  # bf16 has the range of fp32
        return "Train with {set}.", {"train.precision": "bf16"}
    settings: dict[str, object] = {
        "optim.lr": float(f"{config.optim.lr / 3:.2g}"),
        "optim.clip": config.optim.clip or 1.0,
        "schedule.warmup": config.schedule.warmup or 0.02,
    }
    return "Train with {set}.", settings
