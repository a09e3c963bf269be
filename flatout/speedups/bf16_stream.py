"""Keep the hidden states between blocks in bfloat16, which autocast leaves in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.assembly.recipe import Off, Promise, Speedup

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.models.language_model import LanguageModel


def _narrow(model: LanguageModel, _mesh: object) -> LanguageModel:
    """Narrow the embedding's output: blocks add to it in its dtype, and norms compute in fp32."""
    import torch

    embed = model.embed

    def narrowed(*args: Tensor, **kwargs: Tensor) -> Tensor:
        return embed(*args, **kwargs).to(torch.bfloat16)

    model.embed = narrowed  # type: ignore[method-assign]
    return model


SPEEDUP = Speedup(
    name="bf16-stream",
    fills={"residual": _narrow},
    saves="time, and memory in a compiled model: the residual stream and its gradients take 2 "
    "bytes per number instead of 4",
    promise=Promise.rounding(rtol=2e-2),
    needs=("bf16",),
    predicted=(
        "2.3% at GPT-2 124M, compiled: in a block's forward the sum is read and written at both "
        "norms, in backward it is read there and its gradient read and written; two bytes less "
        "each are 20 x d per token and layer, 12 GB in a step of 65,536 tokens, 2.8 ms of 120 at "
        "4.3 TB/s."
    ),
    rank=250,
    auto={
        "cpu": Off("it needs bf16, which is off on a CPU"),
        "cuda": Off(
            "its gain is predicted, not measured; three small models trained on a CPU showed no "
            "difference in loss beyond the spread of three seeds (docs/numbers.md)"
        ),
    },
)
