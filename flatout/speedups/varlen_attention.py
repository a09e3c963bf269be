"""Attention of packed documents as segments of one line, in the flash kernel for that."""

from __future__ import annotations

from flatout.assembly.conditions import gpu_below, uses_gpu
from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if not config.data.document_mask:
        return (
            "It keeps documents apart, and attention goes across them: set data.document_mask=true."
        )
    if not uses_gpu(machine, config):
        return "It needs a GPU: the flash kernel for segments has no CPU form."
    if config.train.precision == "fp32":
        return "The flash kernel takes bf16 and fp16: set train.precision=auto."
    return gpu_below(machine, (8, 0), "The flash kernel")


SPEEDUP = Speedup(
    name="varlen-attention",
    fills={"ops.attention": lazy("flatout.ops.attention:varlen")},
    saves="time and memory: pairs of tokens in different documents are not computed, and no mask of T x T is made",
    promise=Promise.rounding(rtol=2e-2),
    why_not=_why_not,
    rank=420,
    auto={
        "cuda": Off(
            "flex-attention does the same and takes windows and any documents; which of the two is faster is open"
        )
    },
)
