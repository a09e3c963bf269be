"""Read one document a row, short ones in short rows, in a few fixed shapes."""

from __future__ import annotations

from flatout.assembly.recipe import Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    return (
        "A mix is read in windows: its shares are counted in them."
        if config.data.mix is not None
        else None
    )


SPEEDUP = Speedup(
    name="length-buckets",
    fills={"batching": lazy("flatout.data.load.length_buckets:BucketedSteps")},
    saves="time where every row is to be one document: a short one takes a short row, of few fixed shapes, and no row is padded to the longest",
    promise=Promise.statistical(),
    needs=("pretokenised",),
    why_not=_why_not,
)
