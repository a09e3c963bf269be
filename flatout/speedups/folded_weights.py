"""Fold the fixed factors of an eigenstate network's drive and states into weights, per micro-batch.

The promise is for bf16, where folding changes the points at which values are rounded; in fp64 both
agree to 1e-10.
"""

from __future__ import annotations

from flatout.assembly.recipe import Off, Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="folded-weights",
    fills={"ops.folding": lazy("flatout.ops.folding:folded")},
    saves="time and memory: the drive's gain and the states' coupling need no passes of their "
    "own, and a bf16 drive stays in bf16",
    promise=Promise.rounding(rtol=2e-2),
    predicted=(
        "1.4% on eigenstate-small-32k: 12.8 KB less per token and layer (21.5 to 8.7 KB between "
        "the two products, forward and backward, E = 256), times 131,072 tokens and 8 layers is "
        "13.4 GB, or 3.1 ms at 4.3 TB/s, of 228 ms per micro-batch at 575,000 tokens/s"
    ),
    rank=540,
    auto={
        "cpu": Off("its gain on a CPU has not been measured"),
        "cuda": Off("use it for eigenstate networks"),
    },
)
