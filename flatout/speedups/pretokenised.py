"""Read packed tokens from memory-mapped shards instead of tokenising text in the step."""

from __future__ import annotations

from flatout.assembly.recipe import Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="pretokenised",
    fills={"windows": lazy("flatout.data.load.batches:ShardWindows")},
    saves="time: text is tokenised once, before training, and not again in every step of every epoch",
    promise=Promise.exact(),
)
