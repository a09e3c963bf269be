"""Full activation checkpointing: a block keeps only its input, and backward recomputes the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.assembly.recipe import Off, Promise, Speedup, Transform

if TYPE_CHECKING:
    from flatout.models.language_model import LanguageModel
    from flatout.parallel.mesh import Mesh


def _recompute(model: LanguageModel, _mesh: Mesh | None) -> LanguageModel:
    from flatout.assembly.transforms import recompute_blocks

    return recompute_blocks(model)


SPEEDUP = Speedup(
    name="checkpointing",
    fills={"activations": "each block's input"},
    transform=Transform("checkpointing", _recompute),
    saves="memory: each block keeps only its input between forward and backward, for a third "
    "more compute",
    promise=Promise.exact(),
    rank=1010,
    auto={
        "cpu": Off("it costs a third more compute; use it where memory is short"),
        "cuda": Off("it costs a third more compute; use it where memory is short"),
    },
)
