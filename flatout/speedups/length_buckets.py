"""Read one document per row, with short documents in short rows of a few fixed lengths."""

from __future__ import annotations

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import Speedup, Tolerance
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    if config.parallel.per_row > 1:
        return "Processes with the same rows divide rows or batches of data.seq_len tokens."
    if config.data.mix is None:
        return None
    return "A mix counts its shares in sequences of data.seq_len, not in documents."


def apply(parts: Parts) -> None:
    """Read rows of documents."""
    parts.batching = named("flatout.data.load.buckets:document_steps")


SPEEDUP = Speedup(
    name="length-buckets",
    apply=apply,
    saves="time where every row must be one document: short documents use short rows of a few "
    "fixed lengths instead of being padded to the longest",
    tolerance=Tolerance.statistical(),
    needs=("pretokenised",),
    why_not=_why_not,
)
