"""Predict a run's memory and time before it starts, and record its rate at its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from flatout.assembly.memory import capacity_of, require_fitting, trace_memory
from flatout.assembly.prediction import (
    EVALUATION_COST,
    MemoryPrediction,
    PastRun,
    hardware_name,
    keep,
    past_run,
    predict_time,
    runs_here,
    tokens_to_score,
)
from flatout.assembly.resolve import workload_of
from flatout.assembly.run import Run
from flatout.hardware.machine import BUSY_CORES, CpuTimes
from flatout.storage.json_io import JsonObject
from flatout.training.run_plan import RunPlan, RunRequest


@dataclass(frozen=True)
class Forecast:
    """What is known about a run before it is built."""

    runs: Sequence[PastRun]
    """Earlier runs on this hardware."""
    memory: MemoryPrediction | None


def forecast(request: RunRequest, plan: RunPlan) -> Forecast:
    """Return the predicted memory of a planned run. Warn when it may not fit.

    Raises: HardwareError when a new run certainly does not fit.
    """
    runs = runs_here(request.machine, request.device, request.cache)
    config, decisions, ranks = plan.config, plan.decisions, request.ranks
    this, workload = past_run(config, decisions, ranks.world_size), workload_of(config)
    context = psutil.Process().memory_info().rss  # of this process so far
    memory, problem = trace_memory(this, workload, context=context)
    if memory is None:
        request.progress.say(f"Its memory cannot be predicted: {problem}")
        return Forecast(runs, None)
    capacity = capacity_of(request.machine, request.device, ranks.local_world_size)
    is_ours = not any(":" in name for name in this.speedups)
    if capacity is not None and plan.is_new and is_ours:
        warning = require_fitting(config, workload, memory, capacity)
        if warning and ranks.rank == 0:
            request.progress.say(warning)
    return Forecast(runs, memory)


def predict(run: Run, known: Forecast) -> JsonObject:
    """Return what is predicted for a run that is built and restored, with the sources.

    The names are those of the summary's measured metrics.
    """
    memory = known.memory
    time = predict_time(
        past_run(run.config, run.decisions, run.mesh.world_size),
        run.config,
        flops_per_token=_flops_per_token(run),
        peak=run.peak,
        runs=known.runs,
        machine=run.machine,
        dataset=run.dataset,
        first_step=run.step,
        memory=memory,
    )
    return {
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_from": time.source,
        "wall_s": time.wall_s,
        "peak_gib": memory.peak_gib if memory else None,
        "peak_gib_from": memory.source if memory else "not predictable",
    }


def _flops_per_token(run: Run) -> float:
    return float(run.core.flops_per_token(run.config.data.seq_len).causal_exact)


def record(run: Run, request: RunRequest, summary: JsonObject, cached_s: float) -> None:
    """Store how fast a finished run was, for later predictions. A resumed one tells too little.

    `cached_s` is the part of its time in which torch compiled what it then kept on disk.
    """
    hardware, rate = hardware_name(run.machine, str(run.mesh.device)), summary["tokens_per_s"]
    if request.cache is None or hardware is None or run.resumed_from or not rate:
        return
    on_cpu = run.mesh.device.type == "cpu"
    others = request.began.others_until(CpuTimes.read(psutil.Process().children(recursive=True)))
    scored = tokens_to_score(run.config, run.dataset)
    done = past_run(
        run.config,
        run.decisions,
        run.mesh.world_size,
        is_busy=on_cpu and run.mesh.world_size == 1 and others > BUSY_CORES,
        tokens_per_s=rate,
        flops_per_token=_flops_per_token(run),
        beside_s=summary["wall_s"] - (summary["tokens"] + scored / EVALUATION_COST) / rate,
        cached_s=cached_s,
    )
    with suppress(OSError):  # a cache that cannot be written is left alone
        keep(hardware, request.cache, run=done)
