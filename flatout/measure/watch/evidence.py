"""From the windows of a watched loop to evidence."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.hardware import GIB, probe
from flatout.measure.instruments.dividing import compute_on_cpu, step_on_gpu
from flatout.measure.instruments.evidence import (
    CallSite,
    Counts,
    DataFacts,
    Evidence,
    Failure,
    MemoryFacts,
    Phases,
    Roof,
)
from flatout.measure.instruments.machine_facts import host_facts
from flatout.measure.instruments.sampling import site_at
from flatout.measure.watch.hooks import Hooks
from flatout.measure.watch.windows import CALLED_STEPS, PERIODIC, Windows
from flatout.registry import is_user_code
from flatout.training.metrics.device import process_peak_bytes

FEW_STEPS = 5
"""With fewer ordinary steps, averages mean nothing."""


@dataclass(frozen=True)
class Loop:
    """What is known of a loop besides its timings."""

    device: str
    world_size: int = 1
    parameters: int | None = None
    tokens_per_step: int | None = None
    planned_steps: int | None = None
    steps: int = 0
    """Steps taken so far."""
    losses: tuple[tuple[int, float], ...] = ()
    grad_norms: tuple[tuple[int, float], ...] = ()
    failure: Failure | None = None


def evidence_of(loop: Loop, windows: Windows, hooks: Hooks) -> Evidence:
    """Return what is known of a loop, as findings want it."""
    machine = probe()
    known = Evidence(
        source="watched loop",
        machine=machine,
        device=loop.device,
        world_size=loop.world_size,
        host=host_facts(Path()),
        gpu=windows.gpu,
        memory=_memory(loop.device),
        parameters=loop.parameters,
        tokens_per_step=loop.tokens_per_step,
        planned_steps=loop.planned_steps,
        losses=loop.losses or None,
        grad_norms=loop.grad_norms or None,
        failure=loop.failure,
    )
    steps = windows.ordinary.steps
    if steps < FEW_STEPS:
        short = f"{loop.steps} steps are too few to measure: the warm-up takes up to 20."
        return known.model_copy(update={"notes": (*windows.notes, short)})
    step_s = seconds_of_step(windows)
    left = None if loop.planned_steps is None else max(loop.planned_steps - loop.steps, 0)
    return known.model_copy(
        update={
            "steps": steps,
            "step_s": step_s,
            "step_times_s": tuple(windows.step_times_s),
            "phases": phases(windows, loop.device),
            "counts": counts(windows, loop.device),
            "kernels": windows.trace.shares() if windows.trace else None,
            "sites": sites(windows, hooks),
            "host": known.host.model_copy(update={"other_busy_cores": windows.other_cores()}),
            "data": _reading(windows),
            "roof": Roof(
                tokens_per_s=None
                if loop.tokens_per_step is None
                else loop.tokens_per_step / _plain_s(windows),
            ),
            "recompile_reasons": tuple(
                dict.fromkeys(reason for found in windows.compilations for reason in found.reasons)
            ),
            "remaining_s": None if left is None else left * step_s,
            "notes": (*known.notes, *windows.notes),
        }
    )


def seconds_of_step(windows: Windows) -> float:
    """Return the seconds of an average step, all included."""
    return _plain_s(windows) + sum(_shared(windows).values())


def _plain_s(windows: Windows) -> float:
    """Return the seconds of an average step without what is not part of every step."""
    ordinary = windows.ordinary
    return (ordinary.seconds - ordinary.periodic_s()) / ordinary.steps


def _shared(windows: Windows) -> dict[str, float]:
    """Return the seconds per step of what is not part of every step, by phase.

    The wait for the first batch of an epoch is the `first_wait`.
    """
    steps = windows.steps_since_warm_up()
    totals = (windows.ordinary, windows.special, windows.between)
    found = {name: sum(each.phases.get(name, 0.0) for each in totals) / steps for name in PERIODIC}
    return found | {"first_wait": windows.between.phases.get("data_wait", 0.0) / steps}


def phases(windows: Windows, device: str) -> Phases:
    """Return the phases of an average step, each moment counted once."""
    ordinary, shared = windows.ordinary, _shared(windows)
    host = {name: seconds / ordinary.steps for name, seconds in ordinary.phases.items()}
    compile_s = min(windows.compile_s / ordinary.steps, host.get("compute", 0.0))
    compute_s = host.get("compute", 0.0) - compile_s
    common: dict[str, float | None] = {
        "gc_s": host.get("gc", 0.0),
        "compile_s": compile_s,
        "checkpoint_s": shared["checkpoint"],
        "evaluation_s": shared["evaluation"],
        "data_wait_s": host.get("data_wait", 0.0) + shared["first_wait"],
    }
    trace = windows.trace
    if device.startswith("cuda"):
        if trace is None:
            return Phases(**common)
        within_s = sum(host.values()) - sum(host.get(name, 0.0) for name in PERIODIC)
        return Phases(**common | step_on_gpu(trace, within_s - compile_s, host))
    common["optimizer_s"] = host.get("optimizer", 0.0)
    common |= {f"{name}_s": host[name] for name in ("copy", "logging") if name in host}
    if trace is None or windows.has_compiled:
        return Phases(**common | {"compute_s": compute_s})
    return Phases(**common | compute_on_cpu(trace, compute_s))


def counts(windows: Windows, device: str) -> Counts:
    """Return how often things happen in an average step."""
    ordinary, steps = windows.ordinary, windows.ordinary.steps
    since = windows.steps_since_warm_up()
    found: dict[str, float] = {
        "collections": ordinary.calls.get("gc", 0) / steps,
        "full_collections": ordinary.full_collections / steps,
        "recompiles": windows.graphs / steps,
        "empty_cache": windows.rare.calls["empty-cache"] / since,
        "empty_cache_s": windows.rare.seconds["empty-cache"] / since,
    }
    if windows.trace is not None:
        found |= windows.trace.counted()
    marked = windows.marked
    if marked is not None:
        found |= marked.waits(CALLED_STEPS, on_gpu=device.startswith("cuda"))
    return Counts(**found)


def sites(windows: Windows, hooks: Hooks) -> dict[str, tuple[CallSite, ...]]:
    """Return the lines of user code by kind."""
    since, found = windows.steps_since_warm_up(), {}
    if windows.sampler is not None:
        found = dict(windows.sampler.sites(since))
    found |= windows.rare.sites(since)
    if windows.marked is not None:
        marked = windows.marked.sites(CALLED_STEPS)
        found |= {kind: lines for kind, lines in marked.items() if kind in ("sync", "copy")}
    saves = hooks.save_sites(since)
    if saves:
        found["save"] = saves
    recompiled = _recompiled() if windows.graphs else None
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


def _reading(windows: Windows) -> DataFacts:
    steps = windows.ordinary.steps
    known: dict[str, Any] = {}
    for name, key in (("read_bytes", "read_bytes_per_step"), ("stalled_s", "disk_stalled_s")):
        values = [getattr(each, name) for each in windows.disk()]
        if values and None not in values:
            known[key] = sum(values) / steps
    return DataFacts(**known)


def _memory(device: str) -> MemoryFacts:
    if device.startswith("cuda"):
        _, total = torch.cuda.mem_get_info(device)
        return MemoryFacts(
            total_gib=total / GIB,
            peak_gib=torch.cuda.max_memory_allocated(device) / GIB,
            reserved_gib=torch.cuda.max_memory_reserved(device) / GIB,
        )
    return MemoryFacts(total_gib=probe().memory_gib, peak_gib=process_peak_bytes() / GIB)
