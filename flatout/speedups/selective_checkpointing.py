"""Selective activation checkpointing: keep matmuls, attention and scans, recompute the rest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from flatout.assembly.parts import Parts
from flatout.assembly.speedup import Off, Speedup, Tolerance

if TYPE_CHECKING:
    from flatout.models.language_model import LanguageModel


KEPT = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"),
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math",
    "flex_attention",
    "flatout::onednn_product",
    "flatout::scan",
    "mkldnn::_linear_pointwise",
}
"""Operations whose recomputation costs much per byte: matmuls, attention and the scan."""
OFF = Off("it costs some compute: use it where memory is short", when_short=True)


def _recompute(model: LanguageModel) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    from flatout.models.recompute import recompute_layers

    def policy(_context: object, operation: Any, *_inputs: Any, **_options: Any) -> object:
        is_kept = operation.name() in KEPT
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    recompute_layers(model, context_fn=contexts)


def apply(parts: Parts) -> None:
    """Recompute what is cheap."""
    parts.activations = _recompute


SPEEDUP = Speedup(
    name="selective-checkpointing",
    apply=apply,
    saves="memory: backward recomputes norms, activations and sums, but not matmuls, attention "
    "and scans, which are nearly all of the work",
    tolerance=Tolerance.exact(),
    rank=1020,
    auto={"cpu": OFF, "cuda": OFF},
)
