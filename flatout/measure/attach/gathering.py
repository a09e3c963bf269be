"""From the stages over a loop's steps to evidence: phases, counts, lines of code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from flatout.config.registry import is_user_code
from flatout.measure.attach.lines import site_at
from flatout.measure.attach.stages import Stages
from flatout.measure.attach.trace import MEMORY_BOUND, Trace
from flatout.measure.evidence import CallSite, Evidence, lasting_s

COMPUTE = ("compute", "forward", "backward")
"""Phases of the host that are one in `Evidence`."""
WAITS = ("data_wait", "gc", "logging")
"""Phases of the host at which a GPU may idle."""
NOT_COMPUTE = frozenset({"optimizer", "other", "evaluation", "checkpoint", "data"})
"""Phases of a trace whose operations are not those of forward and backward."""


def gathered(known: Evidence, stages: Stages, periodic_s: Mapping[str, float | None]) -> Evidence:
    """Return the evidence with what the stages have measured. There are ordinary steps.

    `periodic_s` is like `Stages.periodic_s`. None is what was not measured.
    """
    steps, extra_s = stages.ordinary.steps, sum(filter(None, periodic_s.values()))
    trace = stages.trace  # reading it may add a note
    screened = stages.screening.screened if stages.screening else {}
    reasons = (reason for found in stages.compilations for reason in found.reasons)
    return known.model_copy(
        update={
            "steps": steps,
            "step_s": stages.step_s + extra_s,
            **phases(stages, periodic_s),
            **counts(stages),
            "kernels": trace.table() if trace else None,
            "counterfactual_s": {
                name: stages.step_s / one.screened.median for name, one in screened.items()
            },
            "sites": sites(stages),
            **stages.usage(),
            "recompile_reason": next(reasons, None),
            "notes": (*known.notes, *stages.notes),
        }
    )


def phases(stages: Stages, periodic_s: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the phases of an average step, each moment counted once."""
    host, trace = stages.ordinary.per_step(), stages.trace
    compute_s = sum(host.get(name, 0.0) for name in COMPUTE)
    compile_s = min(stages.compile_s / stages.ordinary.steps, compute_s)
    compute_s -= compile_s  # what compiling took was inside the step
    found: dict[str, Any] = {
        **periodic_s,
        "data_wait_s": host.get("data_wait", 0.0) + (periodic_s.get("data_wait_s") or 0.0),
        "gc_s": lasting_s(host.get("gc", 0.0), stages.ordinary.full_collections),
        "compile_s": compile_s,
    }
    if stages.on_gpu:
        step_s = stages.step_s - compile_s
        return found | (step_on_gpu(trace, step_s, host) if trace else {})
    found |= {"optimizer_s": host.get("optimizer", 0.0), "compute_s": compute_s}
    found |= {
        f"{name}_s": host[name] for name in ("copy", "logging", "communication") if name in host
    }
    if trace is not None and not stages.has_compiled:
        found |= compute_on_cpu(trace, compute_s)
    step_s = stages.step_s + sum(filter(None, periodic_s.values()))
    return {**found, "other_s": max(step_s - sum(filter(None, found.values())), 0.0)}


def compute_on_cpu(trace: Trace, compute_s: float) -> dict[str, float]:
    """Divide the seconds of forward and backward on a CPU into phases of `Evidence`.

    Compiled code is one operation to the profiler, so that a compiled step cannot be divided.
    """
    inside = [op for op in trace.work if op.within not in NOT_COMPUTE]
    ops_s = sum(op.self_s for op in inside) / trace.steps
    memory_s = sum(op.self_s for op in inside if op.kind in MEMORY_BOUND) / trace.steps
    scale = min(compute_s / ops_s, 1.0) if ops_s else 0.0
    return {
        "compute_s": scale * (ops_s - memory_s),
        "memory_bound_s": scale * memory_s,
        "host_s": compute_s - scale * ops_s,
    }


def step_on_gpu(trace: Trace, step_s: float, host: Mapping[str, float]) -> dict[str, float]:
    """Divide a step by the GPU's kernels, and the time at which it idles by the host's phases.

    The device's time comes from the recorded steps, the step's from ordinary ones. `host` has the
    seconds of the host's phases in an average step.
    """
    by_kind = {row.kind: row.seconds for row in trace.table()}
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


def counts(stages: Stages) -> dict[str, float]:
    """Return how often things happen in an average step."""
    ordinary, steps = stages.ordinary, stages.ordinary.steps
    sampled, host = stages.sampled_steps, ordinary.per_step()
    found: dict[str, float] = {
        "collections": ordinary.calls.get("gc", 0) / steps,
        "recompiles": stages.graphs / steps,
    }
    if stages.trace is not None:
        work_s = sum(host.get(name, 0.0) for name in (*COMPUTE, "optimizer"))
        found |= stages.trace.counted(work_s)
    if stages.sampler is not None:
        found["empty_cache"] = stages.rare.calls["empty-cache"] / sampled
        found["empty_cache_s"] = stages.rare.seconds["empty-cache"] / sampled
    return found | stages.waits


def sites(stages: Stages) -> dict[str, tuple[CallSite, ...]]:
    """Return the lines of user code by kind."""
    found: dict[str, tuple[CallSite, ...]] = {}
    if stages.sampler is not None:
        found |= stages.sampler.sites(stages.sampled_steps)
        found |= stages.rare.lines.sites(stages.sampled_steps)
    found |= stages.sites
    recompiled = _recompiled() if stages.graphs else None
    if recompiled is not None:
        found["recompile"] = (recompiled,)
    return {kind: lines for kind, lines in found.items() if lines}


def _recompiled() -> CallSite | None:
    """Return the function of user code that torch.compile compiled last."""
    compiler = sys.modules.get("torch._dynamo.utils")
    events = compiler.get_compilation_metrics() if compiler is not None else []
    for event in reversed(events):
        file, number = event.co_filename, event.co_firstlineno
        if file and number and is_user_code(file):
            return site_at((file, number))
    return None
