"""Attention that skips the pairs of tokens that document masks and windows exclude."""

from __future__ import annotations

from importlib.util import find_spec

from flatout.assembly.conditions import gpu_below, uses_gpu, without_softcap
from flatout.assembly.recipe import On, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if against := without_softcap(machine, config):
        return against
    window = config.model.own().get("window")
    if not config.data.document_mask and (window is None or window >= config.data.seq_len):
        return (
            "There is no mask to skip: it is for data.document_mask=true, or a model.window "
            "below data.seq_len."
        )
    if not uses_gpu(machine, config):
        return "It needs a GPU: FlexAttention has no backward pass on a CPU."
    if find_spec("triton") is None:
        return "FlexAttention needs Triton, which is not installed: pip install triton."
    return gpu_below(machine, (8, 0), "Triton")


SPEEDUP = Speedup(
    name="flex-attention",
    fills={"ops.attention": lazy("flatout.ops.attention:flex")},
    saves="time and memory: blocks of tokens in other documents or outside the window are "
    "skipped, and there is no T x T mask",
    promise=Promise.rounding(rtol=1e-3),
    why_not=_why_not,
    rank=430,
    auto={"cuda": On("it skips masked pairs, which fused-attention computes")},
)
