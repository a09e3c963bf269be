"""The blocks' large products in 8 bits, with one scale a factor, by torchao."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from flatout.assembly.recipe import Off, Promise, Speedup, Transform, gpu_below, uses_gpu
from flatout.config.schema import RunConfig
from flatout.hardware import Machine

FEWEST_WEIGHTS = 2**22
"""Weights of the smallest product that is taken, in number: below, rounding the factors costs what
the product saves. With every layer of the
blocks in fp8, a GPT-2 of width 768, whose products have up to 2.4 million weights, lost 6% on an H200; one of width 1,536, up to 9.4, gained 6%."""
LARGEST_IN_WIDTHS = 4
"""The largest product of a block is that of the MLP, d_model x 4 d_model where no other width is
stated.
"""


def _in_fp8(model: Any, mesh: Any) -> Any:
    """Exchange the product of each large layer of the blocks; layers, names and weights stay.
    Embedding and head are not in the blocks.
    """
    from flatout.models.layers import Linear
    from flatout.ops.linear import fp8, load_fp8

    load_fp8(emulate=next(model.parameters()).device.type != "cuda")
    for layer in model.blocks.modules():
        if isinstance(layer, Linear) and layer.weight.numel() >= FEWEST_WEIGHTS:
            layer.ops = replace(layer.ops, linear=fp8)
    return model


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if not uses_gpu(machine, config):
        return "It is for GPUs that multiply fp8, and this run is on the CPU."
    too_old = gpu_below(machine, (8, 9), "fp8")
    if too_old:
        return f"{too_old} Use bf16 instead, which needs 8.0."
    if find_spec("torchao") is None:
        return 'It takes the package torchao, which is not installed: pip install "flatout[fp8]".'
    own = config.model.own()
    width = own.get("d_model")
    largest = (
        None if width is None else width * max(own.get("d_ff") or 0, LARGEST_IN_WIDTHS * width)
    )
    if largest is None or largest >= FEWEST_WEIGHTS:
        return None
    return f"The largest product of a block has {largest / 1e6:.1f} million weights; fp8 pays from {FEWEST_WEIGHTS / 1e6:.1f} (model.d_model=1024)."


SPEEDUP = Speedup(
    name="fp8",
    transform=Transform("low-precision", _in_fp8),
    saves="time: the blocks' products of 4 million weights and more run at up to twice the rate of bf16; all others stay as they are",
    promise=Promise.statistical(),
    needs=("bf16", "compile"),
    why_not=_why_not,
    rank=240,
    auto={"cuda": Off("name it for models of width 1,536 and more")},
)
