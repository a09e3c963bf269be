"""Attention with the kernels of FlashAttention 4, which come in a separate package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from flatout.assembly.conditions import gpu_below, uses_gpu, without_softcap
from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine

INSTALL = 'pip install "flatout[flash-attention-4]"'


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if against := without_softcap(machine, config):
        return against
    window = config.model.own().get("window")
    if config.data.document_mask or (window is not None and window < config.data.seq_len):
        return (
            "It supports only plain causal attention: use flex-attention for data.document_mask "
            "or model.window."
        )
    if not uses_gpu(machine, config):
        return (
            "It needs an NVIDIA GPU of compute capability 9.0 or higher, and this run uses a CPU."
        )
    if config.train.precision == "fp32":
        return "FlashAttention 4 supports only bf16 and fp16: set train.precision=auto."
    if too_old := gpu_below(machine, (9, 0), "FlashAttention 4"):
        return too_old
    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        return (
            f"It needs the package flash-attn-4, which is not installed: {INSTALL} "
            "(92 MB, partly under NVIDIA's own licence)."
        )
    return None


SPEEDUP = Speedup(
    name="flash-attention-4",
    fills={"ops.attention": lazy("flatout.ops.attention:flash4")},
    saves="time: attention kernels for Hopper and Blackwell, which also write the gradients of "
    "queries, keys and values into one tensor",
    promise=Promise.rounding(rtol=2e-2),
    why_not=_why_not,
    predicted=(
        "4% at 32,768 tokens with heads of 64, 2% with heads of 128. Attention is 4.9 of 6.5 us "
        "per token there: 12 layers x 14 x 768 x 32,768 / 2 FLOP at the 433 TFLOP/s that cuDNN "
        "reached in the measured step; forward is 2/7 of it. FlashAttention 3, whose tiles these "
        "kernels have on Hopper, was published at 1.20 times cuDNN forward with heads of 64 and "
        "1.09 with 128 (arXiv:2407.08608); backward is assumed equal. At 1,024 tokens 1.7 ms of "
        "65,536 tokens (1.4%), where heads are neither normalised nor rotated: no copy of the "
        "gradients, 302 MB read and 302 MB written in each of 12 layers / 4.3 TB/s."
    ),
    rank=410,
    auto={
        "cpu": Off("it needs a GPU"),
        "cuda": Off("its package is in beta; use it for long sequences"),
    },
)
