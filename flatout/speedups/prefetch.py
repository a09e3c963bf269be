"""Read the next steps' windows in one background thread while the device works."""

from __future__ import annotations

from flatout.assembly.recipe import On, Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="prefetch",
    fills={"feed": lazy("flatout.data.load.feed:PrefetchFeed")},
    saves="time: the next steps' windows are read while the device works, and go to a GPU from pinned memory without waiting",
    promise=Promise.exact(),
    rank=120,
    auto={"cpu": On(measured=True), "cuda": On()},
)
