"""The recurrence of an eigenstate network in Triton's kernels: in registers from token to token,
chunks side by side.
"""

from __future__ import annotations

from importlib.util import find_spec

from flatout.assembly.conditions import gpu_below, uses_gpu
from flatout.assembly.recipe import On, Promise, Speedup, lazy
from flatout.config.schema import RunConfig
from flatout.hardware import Machine


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if not uses_gpu(machine, config):
        return "It needs an NVIDIA GPU of compute capability 7.0 or more, and this run is on a CPU; fast-scan runs there."
    if find_spec("triton") is None:
        return "It needs the package triton, which comes with torch for NVIDIA GPUs and is not installed: `pip install triton`."
    return gpu_below(machine, (7, 0), "Triton")


SPEEDUP = Speedup(
    name="triton-scan",
    fills={"ops.scan": lazy("flatout.ops.scan:triton")},
    saves="time and memory: the drive is read twice and the states are written once, in the drive's own type, and nothing lies between",
    promise=Promise.rounding(rtol=1e-4),
    why_not=_why_not,
    rank=510,
    auto={"cuda": On("of all ways it moves the fewest bytes", unless=("bf16-states",))},
)
