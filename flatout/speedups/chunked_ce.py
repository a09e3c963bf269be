"""Compute the loss and its gradients a few thousand targets at a time, never holding all logits."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import Off, On, Speedup, Tolerance


def apply(parts: Parts) -> None:
    """Use the loss in chunks."""
    parts.cross_entropy = named("flatout.ops.cross_entropy:chunked")


SPEEDUP = Speedup(
    name="chunked-ce",
    apply=apply,
    saves="memory: logits and their gradients exist one chunk at a time (all at once, the "
    "logits take 6.6 GB in fp32 for 32,768 tokens and a vocabulary of 50,304)",
    tolerance=Tolerance.rounding(rtol=1e-4),
    rank=610,
    auto={
        "cpu": Off("bf16-products and onednn also compute the loss: use it where memory is short"),
        "cuda": On(),
    },
)
