"""Selective activation checkpointing: keep matmuls and attention, recompute everything else."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flatout.assembly.recipe import Off, Promise, Speedup, Transform

if TYPE_CHECKING:
    from flatout.models.language_model import LanguageModel
    from flatout.parallel.mesh import Mesh


def _recompute(model: LanguageModel, _mesh: Mesh | None) -> LanguageModel:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    from flatout.assembly.transforms import recompute_blocks

    return recompute_blocks(
        model, context_fn=partial(create_selective_checkpoint_contexts, _kept_operations())
    )


def _kept_operations() -> list[object]:
    """Return the operations whose recomputation costs much per byte: matmuls and attention."""
    import torch
    from torch.nn.attention import varlen  # noqa: F401  # the import registers its operation

    products = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
    attention = (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "attention_math",
    )
    names = [*products, *(f"_scaled_dot_product_{kind}" for kind in attention)]
    found = [getattr(torch.ops.aten, name, None) for name in names]
    found.append(getattr(torch.ops.torch_attn, "_varlen_attn", None))
    kept = [operation.default for operation in found if operation is not None]
    return [*kept, torch.ops.higher_order.flex_attention]


SPEEDUP = Speedup(
    name="selective-checkpointing",
    fills={"activations": "products and attention"},
    transform=Transform("checkpointing", _recompute),
    saves="memory: backward recomputes norms, activations and sums, but not matmuls and "
    "attention, which are nearly all of the work",
    promise=Promise.exact(),
    rank=1020,
    auto={
        "cpu": Off("it costs some compute; use it where memory is short"),
        "cuda": Off("it costs some compute; use it where memory is short"),
    },
)
