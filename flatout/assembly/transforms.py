"""Model transforms that several speedups share: recompute blocks, compile blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.models.language_model import LanguageModel
    from flatout.parallel.mesh import Mesh


def recompute_blocks(
    model: LanguageModel, _mesh: Mesh | None = None, **options: Any
) -> LanguageModel:
    """Wrap each block in torch's `checkpoint` with these options; parameter names do not change."""
    from torch.utils.checkpoint import checkpoint

    def recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # dynamo traces a function that calls `checkpoint`, and no partial of it
        def call(*inputs: Tensor | None) -> Tensor:
            return checkpoint(forward, *inputs, use_reentrant=False, **options)  # type: ignore[no-any-return]

        return call

    for block in model.blocks:
        block.forward = recomputed(block.forward)
    return model


def compile_blocks(model: LanguageModel, _mesh: Mesh | None) -> LanguageModel:
    """Compile each block in place, and the loss, which includes the output projection.

    Embedding and final norm are not compiled. The loss takes its weight as an argument, so that no
    graph guards a parameter that fully_shard gathers and frees.
    """
    import torch

    for block in model.blocks:
        block.compile(dynamic=False)
    cross_entropy = torch.compile(model.ops.cross_entropy, dynamic=False)
    model.ops = replace(model.ops, cross_entropy=cross_entropy)
    return model
