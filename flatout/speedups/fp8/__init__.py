"""Large matmuls of the blocks in 8 bits, with one scale per factor, through torchao."""

from __future__ import annotations

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import (
    Off,
    Speedup,
    Tolerance,
    first_of,
    needs_gpu,
    needs_package,
)
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine

FEWEST_WEIGHTS = 2**22
"""Number of weights of the smallest matmul computed in fp8: below, rounding the factors costs as
much as the matmul saves. With every layer of the blocks in fp8, a GPT-2 of width 768, whose
matmuls have up to 2.4 million weights, lost 6% on an H200. One of width 1,536, up to 9.4 million,
gained 6%.
"""
LARGEST_IN_WIDTHS = 4
"""The largest matmul of a block is that of the MLP, d_model x 4 d_model unless d_ff is set. Of a
small one it may be that of queries, keys and values."""


def apply(parts: Parts) -> None:
    """Multiply in fp8 where the weights are many."""
    parts.linear = named("flatout.speedups.fp8.linear:fp8")


def _too_small(_machine: Machine, config: RunConfig) -> str | None:
    own = config.model.own()
    width = own.get("d_model")
    if width is None:
        return None
    largest = width * LARGEST_IN_WIDTHS * width
    if inner := own.get("d_ff"):
        heads = own.get("num_heads") or 1
        stacked = heads + 2 * (own.get("num_kv_heads") or heads)
        stacked *= own.get("head_dim") or width // heads
        largest = width * max(inner * (1 + ("glu" in str(own.get("activation")))), stacked)
    if largest >= FEWEST_WEIGHTS:
        return None
    return (
        f"The largest matmul of a block has {largest / 1e6:.1f} million weights. "
        f"fp8 pays off from {FEWEST_WEIGHTS / 1e6:.1f} (model.d_model=1024, with the default "
        "model.d_ff)."
    )


SPEEDUP = Speedup(
    name="fp8",
    apply=apply,
    saves="time: matmuls in the blocks with at least 4 million weights run at up to twice the "
    "rate of bf16, and the others do not change",
    tolerance=Tolerance.statistical(),
    needs=("bf16", "compile"),
    why_not=first_of(
        needs_gpu("fp8", (8, 9), instead="bf16"), needs_package("torchao", extra="fp8"), _too_small
    ),
    rank=240,
    auto={"cuda": Off("use it for a model.d_model of 1,536 or more")},
)
