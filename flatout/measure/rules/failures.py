"""Failures: the run ended, cannot start, or trains badly."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from flatout.measure.rules import Finding, Fix, Harm, fix, rule
from flatout.measure.steps.evidence import Evidence

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


@rule()
def failure(evidence: Evidence) -> Finding | None:
    """The run ends with an error, makes no progress, or cannot start: no data, no package."""
    ended = evidence.failed("error", "hang", "missing-package", "no-data")
    if ended is None:
        return None
    verdict, advice, site = ended.message, ended.fix, ended.site
    if ended.kind == "error":
        verdict = f"The run fails{f' at step {ended.step}' if ended.step else ''}: {verdict}"
    elif ended.kind == "hang" and site is not None:
        verdict += f" It was at {site.describe()}."
        advice = "Look at the line: a lock, a read from a network, or a loop without an end."
    elif ended.kind == "hang":
        advice = "Start it with `flatout train`, and inspect it with `py-spy dump --pid PID`."
    fixes = (fix(advice),) if advice else ()
    return Finding(verdict=f"{verdict.rstrip('.')}.", harm="fails", site=site, fixes=fixes)


@rule()
def unstable_training(evidence: Evidence) -> Finding | None:
    """The loss diverges, jumps or rises again, or float16 keeps overflowing.

    A jump after which the loss returns to its level is a warning: where batches have few rows, or
    rows that differ much, single losses are far above the others in stable training too. A level
    that stays up is lost progress.
    """
    diverged, losses = evidence.failed("diverged"), evidence.losses or ()
    lost = next((step for step, loss in losses if not math.isfinite(loss)), None)
    skipped, values = evidence.skipped_steps or 0, [loss for _, loss in losses]
    harm: Harm = "fails" if diverged is not None or lost is not None else "spoils"
    # a loss of both signs is a difference, as of rewards, whose level means nothing
    if lost is not None or len(values) < MIN_LOSSES or min(values) < 0 < max(values):
        values = []
    jump = _worst_jump(values) if values else None
    rise = _rise(values) if len(values) >= MIN_OF_RISE else None
    jumps = f"The loss jumps by {jump[1]:.3g} at step {losses[jump[2]][0]}" if jump else ""
    if diverged is not None:
        verdict = diverged.message
    elif lost is not None:
        verdict = f"The loss is not a number from step {lost}."
    elif jump and jump[0]:
        verdict = f"{jumps}, and stays up."
    elif rise is not None:
        best = min(range(len(values)), key=values.__getitem__)
        verdict = f"The loss rises again: {values[best]:.3g} at step {losses[best][0]}, and "
        verdict += f"{rise:.3g} at the end."
    elif skipped > MOST_SKIPPED * (evidence.steps or math.inf):
        verdict = f"float16 overflowed, and {skipped} of {evidence.steps} updates were skipped."
    elif jump:
        harm, verdict = "warns", f"{jumps}."
    else:
        return None
    keys = ("optim.lr", "schedule.warmup", "optim.clip")
    figures = {key: evidence.setting(key) for key in keys}
    return Finding(verdict=verdict, harm=harm, figures=figures, fixes=_calmer(evidence))


def _noise_floor(values: Sequence[float]) -> float:
    """Return the change of a loss that means nothing, as that of one which has reached zero."""
    return max(NOISE_SHARE * abs(statistics.median(values[:8])), NOISE)


def _worst_jump(values: Sequence[float]) -> tuple[bool, float, int] | None:
    """Return whether the largest jump above the losses before it lasts, its size and index.

    Those that last come first. None without a jump. The first eighth of the run does not count: the
    loss falls fast there.
    """
    found, few = [], max(len(values) // 8, MIN_LASTING)
    for index in range(few, len(values)):
        before = values[max(index - 16, 0) : index]
        level = statistics.median(before)
        deviation = 1.4826 * statistics.median(abs(value - level) for value in before)
        limit = max(JUMP_DEVIATIONS * deviation, JUMP_SHARE * abs(level), _noise_floor(values))
        if values[index] > level + limit:
            after = values[index : index + few]
            lasts = len(after) > 2 and statistics.median(after) > level + limit
            found.append((lasts, values[index] - level, index))
    return max(found, default=None)


def _rise(values: Sequence[float]) -> float | None:
    """Return the level of the last losses, if it is well above the lowest of eight levels."""
    part = len(values) // 8
    levels = [statistics.median(values[-n * part :][:part]) for n in range(8, 0, -1)]
    noise = statistics.median(abs(b - a) for a, b in itertools.pairwise(values))
    lowest = min(levels)
    limit = max(
        RISEN_SHARE * (levels[0] - lowest),
        0.05 * abs(lowest),
        MIN_RISE * noise,
        _noise_floor(values),
    )
    return levels[-1] if levels[-1] - lowest > limit else None


def _calmer(evidence: Evidence) -> list[Fix]:
    """Return settings with which training is more stable."""
    config = evidence.config
    if config is None:
        texts = (
            "Lower the learning rate, or lengthen its warm-up.",
            "Clip the gradient's norm at 1.",
        )
        return [fix(text, same_result=False) for text in texts]
    lower = float(f"{config.optim.lr / 3:.2g}")
    changes: dict[str, tuple[object, str, str | float]] = {
        "Clip the gradient's norm": (not config.optim.clip, "optim.clip", 1.0),
        "Lower the learning rate": (True, "optim.lr", lower),
        "Warm it up": (config.schedule.warmup == 0, "schedule.warmup", 0.02),
        "Use bf16, which has the range of fp32": (
            *(config.train.precision == "fp16", "train.precision", "bf16"),
        ),
    }
    return [
        fix(f"{what}: {key}={value}.", overrides={key: value}, same_result=False)
        for what, (helps, key, value) in changes.items()
        if helps
    ]
