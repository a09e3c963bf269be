"""Read the next steps' sequences in a background thread while the device computes."""

from flatout.assembly.recipe import On, Speedup, Tolerance, lazy

SPEEDUP = Speedup(
    name="prefetch",
    fills={"loader": lazy("flatout.data.load.loader:PrefetchLoader")},
    saves="time: batches for the next steps are read while the device computes, and copied to "
    "a GPU asynchronously from pinned memory",
    tolerance=Tolerance.exact(),
    rank=120,
    auto={"cpu": On(measured=True), "cuda": On()},
)
