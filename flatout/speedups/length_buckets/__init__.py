"""Read one document per row, with short documents in short rows of a few fixed lengths."""

from __future__ import annotations

from flatout.assembly.recipe import Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    if config.data.mix is not None:
        return "A mix counts its shares in sequences of data.seq_len, not in documents."
    return None


SPEEDUP = Speedup(
    name="length-buckets",
    fills={"batching": lazy("flatout.speedups.length_buckets.steps:BucketedSteps")},
    saves="time where every row must be one document: short documents use short rows of a few "
    "fixed lengths instead of being padded to the longest",
    promise=Promise.statistical(),
    needs=("pretokenised",),
    why_not=_why_not,
)
