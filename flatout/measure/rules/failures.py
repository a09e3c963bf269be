"""Failures: the run ended, cannot start, or trains badly."""

from __future__ import annotations

import math

from flatout.measure.evidence import Evidence
from flatout.measure.rules import Found, Remedy, rule
from flatout.training.metrics.alarms import Level

MARGIN = 0.03
"""Smallest rise of the loss that counts, in the logarithm, as in a run's alarms."""
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


@rule(site="not-finite")
def unstable_training(evidence: Evidence) -> Found | None:
    """The loss diverges, or rises and stays up, or float16 keeps overflowing."""
    losses, level, rise = evidence.losses or (), Level(MARGIN), None
    lost = next((step for step, loss in losses if not math.isfinite(loss)), None)
    # a loss of both signs is a difference, as of rewards, whose level means nothing, and rows that
    # grow with the steps may be harder
    if lost is None and "size" not in evidence.grows and all(loss > 0 for _, loss in losses):
        for step, loss in losses:
            rise = level.see(step, math.log(loss)) or rise
    text = ""
    if rise is not None and not rise.is_over:
        usual, now = math.exp(rise.usual), math.exp(rise.now)
        text = f"The loss rises from {usual:.3g} to {now:.3g} at step {rise.since_step}, and stays "
        text += "up."
    overflows = (evidence.skipped_steps or 0) > MOST_SKIPPED * (evidence.steps or math.inf)
    found = (
        (evidence.failed("diverged") and "fails", "{e.failure.message}"),
        (
            lost is not None and "fails",
            f"The loss is not a number from step {lost}"
            + (
                ": the data that {site} is given has values that are not finite."
                if evidence.bad_data
                else ": the first value that is not finite comes from {site}."
                if evidence.site("not-finite")
                else "."
            ),
        ),
        (text and "spoils", text),
        (
            overflows and "spoils",
            "float16 overflowed, and {e.skipped_steps} of {e.steps} updates were skipped.",
        ),
    )
    return *next((one for one in found if one[0]), found[0]), (calmer,)


def calmer(evidence: Evidence, _: float) -> Remedy:
    """Return the settings with which training is more stable."""
    config, losses = evidence.config, evidence.losses or ()
    if evidence.bad_data:
        return "Look for NaN and infinity in the data: torch.isfinite(batch).all() in the loop."
    if evidence.site("not-finite"):
        return (
            "Look there and at what leads to it: keep the arguments of logarithms, roots and "
            "divisions in range (clamp, logsumexp, cross_entropy), and the data finite."
        )
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
