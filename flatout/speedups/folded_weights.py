"""What an eigenstate network does to its drive and its states by fixed factors, done to the weights
beside them once a micro-batch.
"""

from __future__ import annotations

from flatout.assembly.recipe import Off, Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="folded-weights",
    fills={"ops.folding": lazy("flatout.ops.folding:folded")},
    saves="time and memory: no pass over the drive for its gain, none over the states for their coupling, and a drive in bf16 stays so",
    promise=Promise.rounding(rtol=2e-2),
    predicted=(
        "1.4% on eigenstate-small-32k: 12.8 KB fewer a token and layer (21.5 to 8.7 KB between the two products, forward and backward, E = 256), "
        "times 131,072 tokens and 8 layers is 13.4 GB, or 3.1 ms at 4.3 TB/s, of 228 ms a micro-batch at 575,000 tokens/s"
    ),
    rank=540,
    auto={
        "cpu": Off("what it gains on a CPU is open"),
        "cuda": Off("name it for eigenstate networks"),
    },
)
"""The promise is for bf16, which rounds folded weights in other places than it rounds drive and
states; in fp64 both agree to 1e-10.
"""
