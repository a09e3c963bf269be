"""A plan as plain figures: the fields of `flatout plan --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flatout.assembly.memory import most_rows, smallest_machine
from flatout.assembly.prediction import GIB, TimePrediction, speedups_on
from flatout.measure.plan.changes import changes
from flatout.measure.plan.plan import Plan, memory_at_peak
from flatout.progress import SILENT, Progress

DOES_NOT_FIT = "none: it does not fit"
"""Where the rate of a run that does not fit comes from."""


def fields_of(
    plan: Plan, price_per_hour: float | None = None, *, progress: Progress = SILENT
) -> dict[str, Any]:
    """Return the fields of the result; what is unknown is None."""
    config, target, time = plan.config, plan.target, plan.time
    memory, capacity, fits = plan.memory, plan.capacity, plan.fits
    rows, accumulate = plan.batch
    steps = config.train.steps
    parts = memory_at_peak(memory) if memory else None
    if parts is not None:
        parts["available"] = capacity.free / GIB if capacity else None
    with progress.task("Trying what fits"):
        largest = None if plan.available is None else most_rows(plan.workload, plan.available)
        tried = changes(plan) if fits is False else []
        cannot_fit = memory and fits is False and not largest
        smallest = smallest_machine(plan.workload) if cannot_fit else None
    if fits is False and not target.is_missing:  # a run without room has no rate
        time = TimePrediction(None, None, None, DOES_NOT_FIT, None)
    row = target.machine.row if target.device.startswith("cuda") else None
    power = row.power_w if row else None
    hours = None if time.wall_s is None else time.wall_s / 3600
    return {
        "recipe": config.name,
        "machine": target.describe(),
        "device": target.device,
        "world_size": target.world_size,
        "params": sum(plan.parts.values()),
        "params_by_part": plan.parts,
        "flops_per_token": float(plan.flops.causal_exact),
        "flops_per_token_palm": float(plan.flops.palm),
        "rows_per_device": rows,
        "accumulate": accumulate,
        "steps": steps,
        "tokens": None if steps is None else steps * (config.batch.tokens_per_step or 0),
        "speedups": speedups_on(plan.decisions),
        "notes": plan.notes,
        "memory": parts,
        "memory_from": memory.source if memory else None,
        "memory_error": memory.error if memory else None,
        "peak_gib": memory.peak_gib if memory else None,
        "fits": fits,
        "largest_rows_per_device": largest,
        "changes": [asdict(change) for change in tried],
        "smallest_machine": smallest,
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_from": time.source,
        "mfu": time.mfu,
        "mfu_of": f"{plan.peak.tflops:,.4g} TFLOP/s ({plan.peak.source})" if plan.peak else None,
        "wall_s": time.wall_s,
        "wall_s_error": time.error,
        "kwh": power.value * target.world_size * hours / 1000
        if power and hours is not None
        else None,
        "kwh_from": f"{power.value:g} W per GPU ({power.source})" if power else None,
        "cost": None if price_per_hour is None or hours is None else price_per_hour * hours,
    }
