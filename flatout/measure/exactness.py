"""How an exact promise is judged where two runs of one command differ in their last bits.

On a GPU they do: attention and the embedding add up gradients in no fixed order. So where the
losses of two sets of speedups differ there although they are promised to be equal, both sets run
once more, untimed, with train.deterministic=true, and those losses decide. Comparing the difference
with that between repeats was the alternative: it takes more runs, and cannot tell a small error
from noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flatout.config.schema import RunConfig
from flatout.measure.spec import TrialResult

STEPS = 10
"""Losses that are compared: more than the steps that any speedup holds ready, so that each of its
buffers comes round again.
"""
Losses = Sequence[float]


def repeats_to_the_bit(config: RunConfig) -> bool:
    """Say whether two runs of a resolved configuration give losses that are equal in every bit: on
    a CPU, or with train.deterministic.
    """
    return config.train.device == "cpu" or config.train.deterministic


def paired(losses: Iterable[tuple[Losses, ...]]) -> list[tuple[list[float], list[float]]]:
    """Return pairs of losses cut to one length; a pair in which one is empty is left out."""
    return [
        (list(one[: len(other)]), list(other[: len(one)])) for one, other in losses if one and other
    ]


def differ(pairs: Iterable[tuple[Losses, Losses]]) -> bool:
    """Say whether any pair of losses is not equal in every bit."""
    return any(list(one) != list(other) for one, other in pairs)


def missing(runs: Sequence[TrialResult | None]) -> str | None:
    """Return why the runs with train.deterministic=true cannot judge a promise; None when they can."""
    failed = next((run for run in runs if run is not None and not run.is_ok), None)
    if failed is not None:
        return f"not judged: the run with train.deterministic=true gave no losses: {failed.reason}"
    if any(run is None or not run.losses for run in runs):
        return "not judged: two runs of one command differ here, and there was no time for runs with train.deterministic=true"
    return None
