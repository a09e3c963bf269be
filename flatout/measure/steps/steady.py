"""Decides when the time of a step is steady, so that a warm-up is over."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

WINDOW_STEPS, WINDOW_S = 8, 1.0
"""Minimum steps and seconds of a warm-up window."""
TOLERANCE = 0.02
"""Two windows agree if their median steps differ by no more than this share."""


def is_steady(step_s: Sequence[float]) -> bool:
    """Return whether the step time is steady, so that the warm-up is over.

    The first step never counts: it compiles, allocates and opens files. After it, the medians of
    the last window and of the one before it must agree within 2%. A window is the shortest run of
    at least eight steps and at least a second, so that neither a few quick steps nor a process that
    is still getting faster counts as steady.
    """
    last = window_ending(step_s, len(step_s))
    before = window_ending(step_s, len(step_s) - len(last)) if last else ()
    if not before:
        return False
    median = statistics.median(last)
    return abs(statistics.median(before) - median) <= TOLERANCE * median


def window_ending(step_s: Sequence[float], end: int) -> Sequence[float]:
    """Return the window of steps before `end`, without the first step.

    It is empty when there are too few steps, or they are too short.
    """
    seconds = 0.0
    for start in range(end - 1, 0, -1):
        seconds += step_s[start]
        if end - start >= WINDOW_STEPS and seconds >= WINDOW_S:
            return step_s[start:end]
    return ()
