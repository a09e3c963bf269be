"""Activation checkpointing, full: a block keeps its input alone, and computes the rest again when backward comes to it."""

from __future__ import annotations

from functools import partial
from typing import Any

from flatout.recipe import Promise, Speedup, Transform, always


def _recompute(model: Any, mesh: Any) -> Any:
    """Patch each block's forward, so that names of parameters stay."""
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


SPEEDUP = Speedup(
    name="checkpointing",
    fills={"activations": "each block's input"},
    transform=Transform("checkpointing", _recompute),
    saves="memory: between forward and backward a block holds one tensor a token, for a third more work",
    promise=Promise.exact(),
    why_not=always,
)
