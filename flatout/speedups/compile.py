"""torch.compile: run the model's forward and backward as generated, fused kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.assembly.recipe import On, Speedup, Tolerance, compile_blocks, without_compiler

if TYPE_CHECKING:
    from flatout.distributed.mesh import Mesh
    from flatout.models.language_model import LanguageModel

MOST_BLOCKS = {"cpu": 6, "cuda": 16}
"""The deepest model that is compiled as a whole: on a CPU, one of 12 blocks is 1 to 3% faster as a
whole, and takes 20 seconds more to compile.
"""


def _compile(model: LanguageModel, mesh: Mesh | None) -> LanguageModel:
    """Compile in place, which keeps parameter names. By block if it is wrapped, or if deep.

    The hooks of fully_shard break a whole graph. Under DDP, the backward pass of a whole graph is
    one piece: all gradients arrive at its end, and their synchronisation overlaps with nothing. By
    block, it starts with the last block's. torch's own remedy (`optimize_ddp`) splits the graph of
    what is compiled inside DDP's forward, which the warm-up avoids, and no graph that contains a
    higher-order operation such as flex-attention. Compiling a whole model takes time in proportion
    to its blocks, minutes for 48; by block, all of one shape share a graph.
    """
    is_wrapped = mesh is not None and (mesh.world_size > 1 or mesh.device_mesh is not None)
    device = next(model.parameters()).device.type
    if is_wrapped or len(model.layers) > MOST_BLOCKS.get(device, 0):
        return compile_blocks(model, mesh)
    model.compile(dynamic=False)
    return model


SPEEDUP = Speedup(
    name="compile",
    fills={"compilation": _compile},
    saves="time: elementwise operations are fused, and the model runs without Python's "
    "overhead; with several processes, or more than 6 blocks on a CPU and 16 on a GPU, each block "
    "is compiled separately",
    tolerance=Tolerance.rounding(rtol=1e-3),
    compiles=True,
    why_not=without_compiler,
    rank=910,
    auto={
        "cpu": On(beside="bf16-products", from_minutes=1, measured=True),
        "cuda": On(from_minutes=2),
    },
)
