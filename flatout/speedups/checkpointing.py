"""Full activation checkpointing: a block keeps only its input, and backward recomputes the rest."""

from flatout.assembly.recipe import Off, Speedup, Tolerance, lazy

OFF = Off("it costs a third more compute: use it where memory is short", when_short=True)

SPEEDUP = Speedup(
    name="checkpointing",
    fills={"activations": lazy("flatout.assembly.memory:recompute_blocks")},
    saves="memory: each block keeps only its input between forward and backward, for a third "
    "more compute",
    tolerance=Tolerance.exact(),
    rank=1010,
    auto={"cpu": OFF, "cuda": OFF},
)
