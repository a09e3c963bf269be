"""Large matmuls of the blocks in 8 bits, with one scale per factor, through torchao."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.assembly.conditions import gpu_below, uses_gpu, without_package
from flatout.assembly.recipe import Off, Promise, Speedup
from flatout.config.schema import RunConfig
from flatout.hardware import Machine

if TYPE_CHECKING:
    from flatout.models.language_model import LanguageModel
    from flatout.parallel.mesh import Mesh

FEWEST_WEIGHTS = 2**22
"""Number of weights of the smallest matmul computed in fp8: below, rounding the factors costs as
much as the matmul saves. With every layer of the blocks in fp8, a GPT-2 of width 768, whose
matmuls have up to 2.4 million weights, lost 6% on an H200; one of width 1,536, up to 9.4 million,
gained 6%.
"""
LARGEST_IN_WIDTHS = 4
"""The largest matmul of a block is that of the MLP, d_model x 4 d_model unless d_ff is set."""


def _to_fp8(model: LanguageModel, _mesh: Mesh | None) -> LanguageModel:
    """Replace the matmul of each large layer of the blocks; layers, names and weights stay.

    Embedding and head are not in the blocks.
    """
    from flatout.models.layers import Linear
    from flatout.speedups.fp8.product import fp8, load_fp8

    load_fp8(emulate=next(model.parameters()).device.type != "cuda")
    for layer in model.blocks.modules():
        if isinstance(layer, Linear) and layer.weight.numel() >= FEWEST_WEIGHTS:
            layer.ops = replace(layer.ops, linear=fp8)
    return model


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if not uses_gpu(machine, config):
        return "It needs a GPU with fp8 tensor cores, and this run uses a CPU."
    if too_old := gpu_below(machine, (8, 9), "fp8"):
        return f"{too_old} Use bf16 instead, which needs 8.0."
    if against := without_package("torchao", extra="fp8"):
        return against
    own = config.model.own()
    width = own.get("d_model")
    if width is None:
        return None
    largest = width * max(own.get("d_ff") or 0, LARGEST_IN_WIDTHS * width)
    if largest >= FEWEST_WEIGHTS:
        return None
    return (
        f"The largest matmul of a block has {largest / 1e6:.1f} million weights; "
        f"fp8 pays off from {FEWEST_WEIGHTS / 1e6:.1f} (model.d_model=1024)."
    )


SPEEDUP = Speedup(
    name="fp8",
    fills={"low_precision": _to_fp8},
    saves="time: matmuls in the blocks with at least 4 million weights run at up to twice the "
    "rate of bf16; the others do not change",
    promise=Promise.statistical(),
    needs=("bf16", "compile"),
    why_not=_why_not,
    rank=240,
    auto={"cuda": Off("use it for a model.d_model of 1,536 or more")},
)
