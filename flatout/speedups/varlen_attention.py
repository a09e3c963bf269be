"""Attention over packed documents as sequences of different lengths, in a flash kernel."""

from __future__ import annotations

from flatout.assembly.conditions import gpu_below, uses_gpu, without_softcap
from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if against := without_softcap(machine, config):
        return against
    if not config.data.document_mask:
        return (
            "It keeps documents apart, and attention crosses them here: set "
            "data.document_mask=true."
        )
    if not uses_gpu(machine, config):
        return "It needs a GPU: the varlen flash kernel does not run on a CPU."
    if config.train.precision == "fp32":
        return "The flash kernel supports only bf16 and fp16: set train.precision=auto."
    return gpu_below(machine, (8, 0), "The flash kernel")


SPEEDUP = Speedup(
    name="varlen-attention",
    fills={"ops.attention": lazy("flatout.ops.attention:varlen")},
    saves="time and memory: attention between different documents is not computed, and there "
    "is no T x T mask",
    promise=Promise.rounding(rtol=2e-2),
    why_not=_why_not,
    rank=420,
    auto={
        "cuda": Off(
            "flex-attention does the same for windows and any number of documents; which one is "
            "faster has not been measured"
        ),
    },
)
