"""The hidden states between blocks in bfloat16, under autocast that would leave them fp32."""

from __future__ import annotations

from typing import Any

from flatout.assembly.recipe import Off, Promise, Speedup, Transform


def _narrow(model: Any, mesh: Any) -> Any:
    """Narrow what the embedding gives; blocks add to it in its type, and norms compute in fp32
    whatever it is.
    """
    import torch

    embed = model.embed

    def narrowed(*args: Any, **kwargs: Any) -> Any:
        return embed(*args, **kwargs).to(torch.bfloat16)

    model.embed = narrowed
    return model


SPEEDUP = Speedup(
    name="bf16-stream",
    transform=Transform("low-precision", _narrow),
    saves="time, and memory in a compiled model: sums between blocks and their gradients take two bytes instead of four",
    promise=Promise.rounding(rtol=2e-2),
    needs=("bf16",),
    predicted=(
        "2.3% at GPT-2 124M, compiled: in a block's forward the sum is read and written at both norms, in backward it is read there and its "
        "gradient read and written; two bytes less each are 20 x d a token and layer, 12 GB in a step of 65,536 tokens, 2.8 ms of 120 at 4.3 TB/s."
    ),
    rank=250,
    auto={
        "cpu": Off("it needs bf16, which is off on a CPU"),
        "cuda": Off(
            "its gain is predicted, not timed; three small models trained on a CPU ended with no loss difference that three seeds could tell (docs/numbers.md)"
        ),
    },
)
