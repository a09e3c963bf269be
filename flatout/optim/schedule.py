"""The learning rate as a pure function of the optimizer step, with no state to save.

Steps count from 0 to total_steps - 1. After a linear warm-up the rate is at its peak. `cosine`,
`linear` and `wsd` reach `min_lr` at the last step. A run of one step trains at the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flatout.config.registry import unknown_name
from flatout.config.sections import ScheduleConfig


def factor(config: ScheduleConfig, peak_lr: float, step: int, total_steps: int) -> float:
    """Return the factor of the peak learning rate at `step`.

    It is above 0 and at most 1 before the last step. Steps past the end get the last step's factor.

    Raises: ConfigError for an unknown schedule, with the nearest name.
    """
    if config.kind not in SCHEDULES:
        raise unknown_name("schedule", config.kind, SCHEDULES)
    last = total_steps - 1
    warmup = warmup_steps(config, total_steps)
    step = min(step, last)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if last <= warmup:
        return 1.0
    return SCHEDULES[config.kind](config, config.min_lr / peak_lr, step - warmup, last - warmup)


def warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Return how many steps precede the peak, limited so that the peak and the last step fit."""
    steps = (
        round(config.warmup * total_steps) if isinstance(config.warmup, float) else config.warmup
    )
    return max(0, min(steps, total_steps - 2))


def cosine(config: ScheduleConfig, floor: float, step: int, last: int) -> float:
    """Return half a cosine wave from the peak at 0 to `floor` at `last`."""
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * step / last))


def linear(config: ScheduleConfig, floor: float, step: int, last: int) -> float:
    """Return a straight line from the peak at 0 to `floor` at `last`."""
    return floor + (1 - floor) * ((last - step) / last)


def wsd(config: ScheduleConfig, floor: float, step: int, last: int) -> float:
    """Return the peak, then a straight line to `floor` over the last `decay` of the steps.

    WSD stands for warm-up, stable, decay. `decay` is a fraction of the steps after the warm-up.
    """
    falling = min(last, max(1, round(config.decay * last)))
    return floor + (1 - floor) * min(1.0, (last - step) / falling)


def constant(config: ScheduleConfig, floor: float, step: int, last: int) -> float:
    """Return the peak. `min_lr` is not used."""
    return 1.0


SCHEDULES: dict[str, Callable[[ScheduleConfig, float, int, int], float]] = {
    "cosine": cosine,
    "linear": linear,
    "wsd": wsd,
    "constant": constant,
}
"""Each returns the factor `step` steps after the warm-up, of `last` such steps. `floor` is min_lr
divided by the peak.
"""
