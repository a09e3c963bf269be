"""Predicts a run before it starts, and records afterwards what it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from typing import Any

import psutil

from flatout import past_runs
from flatout.assembly.capacity import capacity_of, require_fitting
from flatout.assembly.memory import estimate
from flatout.assembly.prediction import (
    EVALUATION_COST,
    GIB,
    MemoryPrediction,
    Prediction,
    fixed_bytes,
    predict_memory,
    predict_time,
    speedups_on,
    tokens_to_score,
)
from flatout.assembly.resolve import workload_of
from flatout.assembly.run import Run
from flatout.assembly.selection import assemble
from flatout.errors import FlatoutError
from flatout.measured import hardware_name
from flatout.past_runs import PastRun
from flatout.training.metrics.device import reserved_gib
from flatout.training.request import RunRequest
from flatout.training.run_plan import RunPlan


@dataclass(frozen=True)
class Forecast:
    """What is known about a run before it is built."""

    runs: list[PastRun]
    """Earlier runs on this hardware."""
    context: int
    """Bytes of this process so far."""
    memory: MemoryPrediction | None


def forecast(request: RunRequest, plan: RunPlan) -> Forecast:
    """Return the predicted memory of a planned run; warn when it may not fit.

    Raises: HardwareError when a new run certainly does not fit.
    """
    runs = past_runs.read(hardware_name(request.machine, request.device), request.cache)
    context = psutil.Process().memory_info().rss
    recipe, config = assemble(plan.decisions), plan.config
    workload, rows = workload_of(config, recipe), int(config.batch.rows_per_device)
    try:
        found = estimate(workload, rows, config.batch.accumulate or 1)
    except FlatoutError:
        raise
    except Exception as error:  # a custom model may need values, which the trace does not have
        request.progress.say(f"Its memory cannot be predicted: {type(error).__name__}: {error}")
        return Forecast(runs, context, None)
    speedups = speedups_on(plan.decisions)
    ranks = request.ranks
    memory = predict_memory(
        config,
        recipe,
        speedups,
        found,
        runs=runs,
        world_size=ranks.world_size,
        context=context,
    )
    capacity = capacity_of(request.machine, request.device, ranks.local_world_size)
    is_ours = not any(":" in name for name in speedups)
    if capacity is not None and plan.requested is not None and is_ours:
        warning = require_fitting(config, workload, memory, capacity)
        if warning and ranks.rank == 0:
            request.progress.say(warning)
    return Forecast(runs, context, memory)


def predict(run: Run, known: Forecast) -> Prediction:
    """Return the prediction for a run that is built and restored."""
    flops = run.core.flops_per_token(run.config.data.seq_len)
    time = predict_time(
        run.config,
        speedups_on(run.decisions),
        flops_per_token=float(flops.causal_exact),
        peak=run.peak,
        runs=known.runs,
        world_size=run.mesh.world_size,
        dataset=run.dataset,
        first_step=run.step,
    )
    return Prediction(known.memory, time)


def record(run: Run, request: RunRequest, known: Forecast, summary: Mapping[str, Any]) -> None:
    """Store what a finished run took, for later predictions; a resumed one says too little."""
    hardware = hardware_name(run.machine, str(run.mesh.device))
    rate = summary["tokens_per_s"]
    if request.cache is None or hardware is None or run.resumed_from or not rate:
        return
    predicted = summary["predicted"] or {}
    batch, memory = run.config.batch, known.memory
    is_compiled = "compilation" in assemble(run.decisions).filled_by
    done = PastRun(
        by="train",
        recipe=run.config.name,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        torch=version("torch"),
        shape=past_runs.shape_of(run.config),
        kind=run.config.model.kind,
        speedups=speedups_on(run.decisions),
        rows_per_device=int(batch.rows_per_device),
        accumulate=batch.accumulate or 1,
        world_size=run.mesh.world_size,
        is_compiled=is_compiled,
        estimate_gib=memory.estimate.total / GIB if memory else None,
        fixed_gib=fixed_bytes(memory.estimate, is_compiled=is_compiled) / GIB if memory else None,
        variable_gib=(memory.estimate.total - memory.estimate.fixed) / GIB if memory else None,
        context_gib=None if run.mesh.device.type == "cuda" else known.context / GIB,
        peak_gib=summary["peak_gib"],
        reserved_gib=reserved_gib(run.mesh.device),
        tokens_per_s=rate,
        mfu=summary["mfu"],
        compile_s=summary["compile_s"],
        train_s=summary["tokens"] / rate,
        score_s=(tokens_to_score(run.config, run.dataset) or 0) / (EVALUATION_COST * rate),
        wall_s=summary["wall_s"],
        predicted_gib=predicted.get("peak_gib"),
        predicted_tokens_per_s=predicted.get("tokens_per_s"),
        predicted_s=None if summary["stopped_early"] else predicted.get("wall_s"),
    )
    past_runs.keep(hardware, [done], request.cache)
