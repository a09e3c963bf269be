"""The gradient of query, key and value heads in one pass of a Triton kernel, written where the
product's gradient is wanted.
"""

from __future__ import annotations

from importlib.util import find_spec

from flatout.assembly.conditions import gpu_below, uses_gpu
from flatout.assembly.recipe import Off, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    own = config.model.own()
    if not own.get("qk_norm") and own.get("positions", "rotary") == "learned":
        return "Heads are neither normalised nor turned: compile joins the three gradients in one copy. It is for model.qk_norm or rotary positions."
    if not uses_gpu(machine, config):
        return "It needs an NVIDIA GPU of compute capability 8.0 or more, and this run is on a CPU; fused-heads runs there."
    if find_spec("triton") is None:
        return "It needs the package triton, which comes with torch for NVIDIA GPUs and is not installed: `pip install triton`."
    return gpu_below(machine, (8, 0), "Triton in bf16")


SPEEDUP = Speedup(
    name="packed-heads",
    fills={"ops.heads": lazy("flatout.ops.heads:packed")},
    saves="time: the gradients of queries, keys and values are turned back, normalised and joined in one pass, and nothing is kept in between",
    promise=Promise.rounding(rtol=1e-3),
    why_not=_why_not,
    predicted=(
        "2.8 ms of 65,536 tokens of gpt2-124m-fast (2.5%): with qk_norm what Inductor makes of the gradient moves 1,818 MB a layer "
        "(queries' and keys' gradients 201 read, the product 201 twice, an fp32 intermediate 403 written and 403 read for the gains, "
        "values 101 + 101, the result 201), this 805 MB (302 + 201 read, 302 written); 1,013 MB x 12 layers / 4.3 TB/s. "
        "Rotary alone: 1,410 MB and 604 MB, 2.2 ms."
    ),
    rank=460,
    auto={"cuda": Off("name it where queries and keys are normalised or turned")},
)
