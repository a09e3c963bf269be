"""Read the next steps' windows in one background thread while the device works."""

from __future__ import annotations

from flatout.assembly.recipe import Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="prefetch",
    fills={"feed": lazy("flatout.data.load.feed:PrefetchFeed")},
    saves="time: the next steps' windows are read while the device works, and go to a GPU from pinned memory without waiting",
    promise=Promise.exact(),
)
