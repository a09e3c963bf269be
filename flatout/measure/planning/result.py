"""A plan as plain figures: the fields of `flatout plan --json`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from flatout.assembly.prediction import GIB, speedups_on
from flatout.measure.planning.changes import changes
from flatout.measure.planning.energy import cost, kwh, power_of
from flatout.measure.planning.plan import Plan, memory_at_peak
from flatout.progress import SILENT, Progress


def fields_of(
    plan: Plan,
    price_per_hour: float | None = None,
    *,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Return the fields of the result; what is unknown is None."""
    return _what(plan) | _memory(plan, cache, progress) | _time(plan, price_per_hour)


def _what(plan: Plan) -> dict[str, Any]:
    config, target = plan.config, plan.target
    steps, per_step = config.train.steps, config.batch.tokens_per_step or 0
    return {
        "recipe": config.name,
        "machine": target.describe(),
        "device": target.device,
        "world_size": target.world_size,
        "params": sum(plan.parts.values()),
        "params_by_part": plan.parts,
        "flops_per_token": float(plan.flops.causal_exact),
        "flops_per_token_palm": float(plan.flops.palm),
        "rows_per_device": int(config.batch.rows_per_device),
        "accumulate": config.batch.accumulate or 1,
        "steps": steps,
        "tokens": None if steps is None else steps * per_step,
        "speedups": speedups_on(plan.decisions),
        "notes": list(plan.notes),
    }


def _memory(plan: Plan, cache: Path | None, progress: Progress) -> dict[str, Any]:
    memory, fits = plan.memory, plan.fits
    parts = memory_at_peak(memory) if memory else None
    if parts is not None:
        parts["available"] = plan.capacity.free / GIB if plan.capacity else None
    with progress.task("Trying what fits"):
        largest = plan.rows_that_fit()
        tried = changes(plan, cache) if fits is False else []
        smallest = plan.smallest_machine() if fits is False else None
    return {
        "memory": parts,
        "memory_from": memory.source if memory else None,
        "memory_error": memory.error if memory else None,
        "peak_gib": memory.peak_gib if memory else None,
        "fits": fits,
        "largest_rows_per_device": largest,
        "changes": [asdict(change) for change in tried],
        "smallest_machine": smallest,
    }


def _time(plan: Plan, price_per_hour: float | None) -> dict[str, Any]:
    time, target = plan.time, plan.target
    power = power_of(target.machine) if target.device.startswith("cuda") else None
    return {
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_from": time.source,
        "mfu": time.mfu,
        "mfu_of": f"{plan.peak.tflops:,.4g} TFLOP/s ({plan.peak.source})" if plan.peak else None,
        "wall_s": time.wall_s,
        "wall_s_error": time.error,
        "kwh": kwh(power.value if power else None, target.world_size, time.wall_s),
        "kwh_from": f"{power.value:g} W per GPU ({power.source})" if power else None,
        "cost": cost(price_per_hour, time.wall_s),
    }
