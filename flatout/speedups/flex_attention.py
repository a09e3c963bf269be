"""Attention that skips the pairs of tokens that document masks and windows exclude."""

from __future__ import annotations

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import On, Speedup, Tolerance, first_of, needs_gpu, needs_package
from flatout.config.schema import RunConfig
from flatout.hardware.machine import Machine


def _without_mask(_machine: Machine, config: RunConfig) -> str | None:
    window = config.model.own().get("window")
    if config.data.document_mask or (window is not None and window < config.data.seq_len):
        return None
    return (
        "There is no mask to skip: it only helps with data.document_mask=true, or a model.window "
        "below data.seq_len."
    )


def apply(parts: Parts) -> None:
    """Use FlexAttention."""
    parts.attention = named("flatout.ops.attention:flex")


SPEEDUP = Speedup(
    name="flex-attention",
    apply=apply,
    saves="time and memory: blocks of tokens in other documents or outside the window are "
    "skipped, and there is no T x T mask",
    tolerance=Tolerance.rounding(rtol=1e-3),
    why_not=first_of(
        _without_mask,
        needs_gpu("FlexAttention", (8, 0)),
        needs_package("triton"),
    ),
    rank=430,
    auto={"cuda": On("it skips masked pairs, which fused-attention computes")},
)
