"""Divides the seconds of a step into phases by what a profiler saw in some other steps."""

from __future__ import annotations

from collections.abc import Mapping

from flatout.measure.instruments.kernels import MEMORY_BOUND
from flatout.measure.instruments.trace import Trace

WAITS = ("data_wait", "gc", "logging")
"""Phases of the host at which a GPU may idle."""


def compute_on_cpu(trace: Trace, compute_s: float) -> dict[str, float]:
    """Divide the seconds of forward and backward on a CPU into phases of `Phases`.

    Compiled code is one operation to the profiler, so that a compiled step cannot be divided.
    """
    inside = [op for op in trace.work if not (op.within or "").startswith("Optimizer")]
    by_kind: dict[str, float] = {}
    for op in inside:
        by_kind[op.kind] = by_kind.get(op.kind, 0.0) + op.self_s / trace.steps
    ops_s = sum(by_kind.values())
    memory_s = sum(seconds for kind, seconds in by_kind.items() if kind in MEMORY_BOUND)
    scale = min(compute_s / ops_s, 1.0) if ops_s else 0.0
    return {
        "compute_s": scale * (ops_s - memory_s),
        "memory_bound_s": scale * memory_s,
        "host_s": compute_s - scale * ops_s,
    }


def step_on_gpu(trace: Trace, step_s: float, host: Mapping[str, float]) -> dict[str, float]:
    """Divide a step by the GPU's kernels, and the time at which it idles by the host's phases.

    The device's time comes from the recorded steps, the step's from ordinary ones; `host` has the
    seconds of the host's phases in an average step.
    """
    by_kind = {share.kind: share.seconds for share in trace.shares()}
    total_s, busy_s = sum(by_kind.values()), min(trace.busy_s() or 0.0, step_s)
    scale = busy_s / total_s if total_s else 0.0  # kernels that overlap count once
    moved_s = sum(op.self_s for op in trace.kernels if op.name.startswith("Memcpy")) / trace.steps
    memory_s = sum(seconds for kind, seconds in by_kind.items() if kind in MEMORY_BOUND) - moved_s
    apart = {name: by_kind.get(name, 0.0) for name in ("optimizer", "communication")}
    compute_s = total_s - memory_s - moved_s - sum(apart.values())
    idle_s = max(step_s - busy_s, 0.0)
    waits = {name: host.get(name, 0.0) for name in WAITS}
    named_s = sum(waits.values())
    share = min(idle_s / named_s, 1.0) if named_s else 0.0
    return {
        "compute_s": scale * compute_s,
        "memory_bound_s": scale * memory_s,
        "copy_s": scale * moved_s,
        **{f"{name}_s": scale * seconds for name, seconds in apart.items()},
        **{f"{name}_s": share * seconds for name, seconds in waits.items()},
        "host_s": max(idle_s - share * named_s, 0.0),
    }
