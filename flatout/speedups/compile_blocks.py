"""torch.compile by block: blocks of one shape share a graph, so a deep model compiles as fast."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.assembly.recipe import Off, Promise, Speedup, without_compiler

if TYPE_CHECKING:
    from flatout.models.language_model import LanguageModel
    from flatout.parallel.mesh import Mesh

OFF = Off(
    "compile fuses more; use compile-blocks where compiling a deep model takes too long",
    from_minutes=2,
)


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


SPEEDUP = Speedup(
    name="compile-blocks",
    fills={"compilation": compile_blocks},
    saves="time, as compile but without fusion across blocks; compiling 48 blocks takes as "
    "long as compiling one",
    promise=Promise.rounding(rtol=1e-3),
    compiles=True,
    why_not=without_compiler,
    rank=940,
    auto={"cpu": OFF, "cuda": OFF},
)
