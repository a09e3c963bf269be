"""Read packed tokens from memory-mapped shards instead of tokenising text in the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.assembly.parts import Parts
from flatout.assembly.speedup import On, Speedup, Tolerance

if TYPE_CHECKING:
    from flatout.data.load.batches import SequenceReader
    from flatout.data.tokenizers import Tokenizer


def shard_reader(_tokenizer: Tokenizer) -> SequenceReader:
    """Return the reader of packed tokens, which needs no tokenizer."""
    from flatout.data.load.batches import ShardReader

    return ShardReader()


def apply(parts: Parts) -> None:
    """Read packed tokens."""
    parts.reader = shard_reader


SPEEDUP = Speedup(
    name="pretokenised",
    apply=apply,
    saves="time: text is tokenised once, before training, not in every step",
    tolerance=Tolerance.exact(),
    rank=110,
    auto={"cpu": On(measured=True), "cuda": On()},
)
