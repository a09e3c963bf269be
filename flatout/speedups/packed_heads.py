"""Compute the gradient of query, key and value heads in one Triton pass, joined for the matmul."""

from __future__ import annotations

from flatout.assembly.conditions import without_triton
from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    own = config.model.own()
    if not own.get("qk_norm") and own.get("positions", "rotary") == "learned":
        return (
            "Heads are neither normalised nor rotated, so compile already joins the three "
            "gradients in one copy. It is for model.qk_norm or rotary positions."
        )
    return without_triton(machine, config, (8, 0), instead="fused-heads", what="Triton in bf16")


SPEEDUP = Speedup(
    name="packed-heads",
    fills={"ops.heads": lazy("flatout.ops.heads:packed")},
    saves="time: one kernel takes the gradients of queries, keys and values back through "
    "rotation and normalisation and joins them, with no intermediate results",
    promise=Promise.rounding(rtol=1e-3),
    why_not=_why_not,
    predicted=(
        "2.8 ms of 65,536 tokens of gpt2-124m-fast (2.5%): with qk_norm, Inductor's kernels for "
        "the gradient move 1,818 MB per layer (queries' and keys' gradients 201 read, the product "
        "201 twice, an fp32 intermediate 403 written and 403 read for the gains, values 101 + 101, "
        "the result 201), this kernel 805 MB (302 + 201 read, 302 written); 1,013 MB x 12 layers / "
        "4.3 TB/s. Rotary alone: 1,410 MB and 604 MB, 2.2 ms."
    ),
    rank=460,
    auto={"cuda": Off("use it where queries and keys are normalised or rotated")},
)
