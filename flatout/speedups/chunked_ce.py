"""Compute the loss and its gradients a few thousand targets at a time, never holding all logits."""

from __future__ import annotations

from flatout.assembly.recipe import Off, On, Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="chunked-ce",
    fills={"ops.cross_entropy": lazy("flatout.ops.cross_entropy:chunked")},
    saves="memory: the logits of all tokens (6.6 GB in fp32 for 32,768 tokens of a 50,304 "
    "vocabulary) and their gradients never exist at once",
    promise=Promise.rounding(rtol=1e-4),
    rank=610,
    auto={
        "cpu": Off("bf16-products and onednn compute the loss too: use it where memory is short"),
        "cuda": On(),
    },
)
