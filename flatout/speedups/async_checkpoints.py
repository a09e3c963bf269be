"""Write checkpoints in a background thread, from a copy of the state in host memory."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import Off, On, Speedup, Tolerance


def apply(parts: Parts) -> None:
    """Save in the background."""
    parts.state_saver = named("flatout.training.checkpoint.savers:in_background")


SPEEDUP = Speedup(
    name="async-checkpoints",
    apply=apply,
    saves="time: training waits for a copy of the state, not for the disk, and the copy takes as "
    "much host memory as the state",
    tolerance=Tolerance.exact(),
    rank=1030,
    auto={
        "cpu": Off("the writing thread takes cores and memory that training uses"),
        "cuda": On("training continues while the checkpoint is written"),
    },
)
