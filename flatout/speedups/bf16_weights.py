"""Store weights as bfloat16 plus the bits that rounding removed, so that updates stay fp32.

With fused-adamw, and for Muon's matrices, the update on a GPU reads and writes both parts once
(`flatout.ops.split_update`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.assembly.recipe import Off, Promise, Speedup, Transform
from flatout.config.schema import RunConfig
from flatout.hardware import Machine

if TYPE_CHECKING:
    from flatout.models.language_model import LanguageModel
    from flatout.parallel.mesh import Mesh


def _split(model: LanguageModel, mesh: Mesh | None) -> LanguageModel:
    from flatout.models.split_weights import split_weights

    return split_weights(model, mesh)


def _why_not(_machine: Machine, config: RunConfig) -> str | None:
    if config.lora.rank is not None:
        return (
            "LoRA does not update the weights: lora.base_dtype=bf16 stores them in bf16 alone, in "
            "half of the memory."
        )
    if config.parallel.shard > 1:
        return (
            "parallel.shard expects weights of a single dtype: leave bf16-weights out, or set "
            "parallel.shard=1."
        )
    return None


SPEEDUP = Speedup(
    name="bf16-weights",
    transform=Transform("low-precision", _split),
    saves="memory and time: micro-batches do not cast the weights to bf16, and backward keeps "
    "no bf16 copy of them (2 bytes per weight)",
    promise=Promise.rounding(rtol=1e-4),
    needs=("bf16",),
    why_not=_why_not,
    predicted=(
        "0.2% at 124M and 0.7% at 700M, and 2 bytes per weight less memory. Autocast reads 4 and "
        "writes 2 bytes per weight in every micro-batch: 6 B x 124 M / 4.3 TB/s = 0.17 ms of "
        "111 ms (65,536 tokens at 590 K/s), 6 B x 759 M / 4.3 TB/s = 1.06 ms of 154 ms (16,384 "
        "tokens at 106 K/s). The update moves 28 bytes per weight with it and without it: 0.8 ms "
        "and 4.9 ms per step."
    ),
    rank=230,
    auto={
        "cpu": Off("it needs bf16, which is off on a CPU"),
        "cuda": Off("use it where memory is short"),
    },
)
