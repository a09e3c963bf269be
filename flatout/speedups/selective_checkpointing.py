"""Activation checkpointing, selective: products and attention are kept, what lies between them is
computed again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flatout.assembly.recipe import Off, Promise, Speedup, Transform
from flatout.speedups.checkpointing import recompute_blocks


def _recompute(model: Any, mesh: Any) -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return recompute_blocks(
        model, context_fn=partial(create_selective_checkpoint_contexts, _kept_operations())
    )


def _kept_operations() -> list[Any]:
    """What costs much to compute again for the bytes it takes: matrix products and attention, of
    whatever kernel.
    """
    import torch
    from torch.nn.attention import varlen  # noqa: F401  # it registers its operation

    products = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
    attention = (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "attention_math",
    )
    names = [*products, *(f"_scaled_dot_product_{kind}" for kind in attention)]
    found = [getattr(torch.ops.aten, name, None) for name in names] + [
        getattr(torch.ops.torch_attn, "_varlen_attn", None)
    ]
    return [operation.default for operation in found if operation is not None] + [
        torch.ops.higher_order.flex_attention
    ]


SPEEDUP = Speedup(
    name="selective-checkpointing",
    fills={"activations": "products and attention"},
    transform=Transform("checkpointing", _recompute),
    saves="memory: norms, activations and sums are not kept; nearly all of the work is done once",
    promise=Promise.exact(),
    rank=1020,
    auto={
        "cpu": Off("it costs some work: name it where memory is short"),
        "cuda": Off("it costs some work: name it where memory is short"),
    },
)
