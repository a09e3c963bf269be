"""Full activation checkpointing: a block keeps only its input, and backward recomputes the rest."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import Off, Speedup, Tolerance

OFF = Off("it costs a third more compute: use it where memory is short", when_short=True)


def apply(parts: Parts) -> None:
    """Recompute whole layers."""
    parts.activations = named("flatout.models.recompute:recompute_layers")


SPEEDUP = Speedup(
    name="checkpointing",
    apply=apply,
    saves="memory: each block keeps only its input between forward and backward, for a third "
    "more compute",
    tolerance=Tolerance.exact(),
    rank=1010,
    auto={"cpu": OFF, "cuda": OFF},
)
