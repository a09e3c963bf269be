"""Checks exact promises on devices where two runs of one command differ in their last bits.

They do on a GPU, because attention and the embedding accumulate gradients in no fixed order. If the
losses of two sets of speedups differ despite an exact promise, both sets run once more, untimed,
with train.deterministic=true, and those losses decide. The alternative, comparing the difference
with that between repeats, takes more runs and cannot tell a small error from noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flatout.config.schema import RunConfig
from flatout.measure.spec import TrialResult

STEPS = 10
"""Losses to compare: more than any speedup buffers, so that each of its buffers is reused."""
Losses = Sequence[float]


def repeats_to_the_bit(config: RunConfig) -> bool:
    """Return whether two runs of a resolved configuration give bit-equal losses.

    They do on a CPU, or with train.deterministic.
    """
    return config.train.device == "cpu" or config.train.deterministic


def paired(losses: Iterable[tuple[Losses, ...]]) -> list[tuple[list[float], list[float]]]:
    """Return pairs of losses cut to one length; a pair with an empty side is left out."""
    return [
        (list(one[: len(other)]), list(other[: len(one)])) for one, other in losses if one and other
    ]


def differ(pairs: Iterable[tuple[Losses, Losses]]) -> bool:
    """Return whether any pair of losses is not bit-equal."""
    return any(list(one) != list(other) for one, other in pairs)


def missing(runs: Sequence[TrialResult | None]) -> str | None:
    """Return why the deterministic runs cannot decide a promise, None when they can."""
    failed = next((run for run in runs if run is not None and not run.is_ok), None)
    if failed is not None:
        return f"not checked: the run with train.deterministic=true gave no losses: {failed.reason}"
    if any(run is None or not run.losses for run in runs):
        return (
            "not checked: two runs of one command differ here, and there was no time for runs with "
            "train.deterministic=true"
        )
    return None
