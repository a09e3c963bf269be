"""Activation checkpointing, full: a block keeps its input alone, and computes the rest again when
backward comes to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flatout.assembly.recipe import Off, Promise, Speedup, Transform


def recompute_blocks(model: Any, **options: Any) -> Any:
    """Let each block forget what it computed, as torch's `checkpoint` does with these options;
    names of parameters stay.
    """
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return model


def _recompute(model: Any, mesh: Any) -> Any:
    return recompute_blocks(model)


SPEEDUP = Speedup(
    name="checkpointing",
    fills={"activations": "each block's input"},
    transform=Transform("checkpointing", _recompute),
    saves="memory: between forward and backward a block holds one tensor a token, for a third more work",
    promise=Promise.exact(),
    rank=1010,
    auto={
        "cpu": Off("it costs a third more work: name it where memory is short"),
        "cuda": Off("it costs a third more work: name it where memory is short"),
    },
)
