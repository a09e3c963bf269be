"""Read the next steps' sequences in a background thread while the device computes."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import On, Speedup, Tolerance


def apply(parts: Parts) -> None:
    """Read in a thread."""
    parts.loader = named("flatout.data.load.loader:PrefetchLoader")


SPEEDUP = Speedup(
    name="prefetch",
    apply=apply,
    saves="time: batches for the next steps are read while the device computes, and copied to "
    "a GPU asynchronously from pinned memory",
    tolerance=Tolerance.exact(),
    rank=120,
    auto={"cpu": On(measured=True), "cuda": On()},
)
