"""Predict a run's memory and time before it starts, and record the measured ones at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from importlib.metadata import version

import psutil

from flatout.assembly import past_runs
from flatout.assembly.capacity import capacity_of, require_fitting
from flatout.assembly.measured import hardware_name
from flatout.assembly.memory import GIB, MemoryEstimate, estimate
from flatout.assembly.past_runs import PastRun
from flatout.assembly.prediction import (
    EVALUATION_COST,
    MemoryPrediction,
    Prediction,
    past_run,
    predict_memory,
    predict_time,
    speedups_on,
    tokens_to_score,
)
from flatout.assembly.resolve import workload_of
from flatout.assembly.run import Run
from flatout.assembly.selection import assemble
from flatout.errors import FlatoutError
from flatout.hardware import BUSY_CORES, CpuTimes
from flatout.json_io import JsonObject
from flatout.training.metrics.device import reserved_gib
from flatout.training.run_plan import RunPlan
from flatout.training.session import RunRequest


@dataclass(frozen=True)
class Forecast:
    """What is known about a run before it is built."""

    runs: list[PastRun]
    """Earlier runs on this hardware."""
    context: int
    """Bytes of this process so far."""
    memory: MemoryPrediction | None
    began: CpuTimes
    """What all processes had computed by then."""


def forecast(request: RunRequest, plan: RunPlan) -> Forecast:
    """Return the predicted memory of a planned run; warn when it may not fit.

    Raises: HardwareError when a new run certainly does not fit.
    """
    runs = past_runs.read(hardware_name(request.machine, request.device), request.cache)
    began = _cpu_times()
    context = psutil.Process().memory_info().rss
    config, decisions, ranks = plan.config, plan.decisions, request.ranks
    workload = workload_of(config, assemble(decisions))
    rows, accumulate = int(config.batch.rows_per_device), config.batch.accumulate or 1
    try:
        found = known_estimate(plan, runs, ranks.world_size) or estimate(workload, rows, accumulate)
    except FlatoutError:
        raise
    except Exception as error:  # a custom model may need values, which the trace does not have
        request.progress.say(f"Its memory cannot be predicted: {type(error).__name__}: {error}")
        return Forecast(runs, context, None, began)
    memory = predict_memory(
        config, decisions, found, runs=runs, world_size=ranks.world_size, context=context
    )
    capacity = capacity_of(request.machine, request.device, ranks.local_world_size)
    is_ours = not any(":" in name for name in speedups_on(decisions))
    if capacity is not None and plan.requested is not None and is_ours:
        warning = require_fitting(config, workload, memory, capacity)
        if warning and ranks.rank == 0:
            request.progress.say(warning)
    return Forecast(runs, context, memory, began)


def known_estimate(
    plan: RunPlan, runs: Sequence[PastRun], world_size: int
) -> MemoryEstimate | None:
    """Return the estimate of an earlier run that needed the same, or None.

    It saves the trace, a quarter of a second. Custom code is traced again: it may have changed.
    """
    config, speedups = plan.config, speedups_on(plan.decisions)
    names = [config.model.kind, config.optim.kind, *speedups]
    if world_size > 1 or any(":" in name for name in names):
        return None
    batch = (config.batch.rows_per_device, config.batch.accumulate or 1)
    wanted = (*batch, *versions())
    same = past_runs.alike(runs, past_runs.shape_of(config), speedups, world_size)
    known = (
        run.estimate
        for run in reversed(same)
        if (run.rows_per_device, run.accumulate, run.torch, run.flatout) == wanted
    )
    return next(known, None)


def versions() -> tuple[str, str]:
    """Return the versions of torch and flatout, on which an estimate depends."""
    return version("torch"), str(import_module("flatout").__version__)


def _cpu_times() -> CpuTimes:
    return CpuTimes.read(psutil.Process().children(recursive=True))


def predict(run: Run, known: Forecast) -> Prediction:
    """Return the prediction for a run that is built and restored."""
    flops = run.core.flops_per_token(run.config.data.seq_len)
    time = predict_time(
        run.config,
        run.decisions,
        flops_per_token=float(flops.causal_exact),
        peak=run.peak,
        runs=known.runs,
        world_size=run.mesh.world_size,
        dataset=run.dataset,
        first_step=run.step,
        workload=workload_of(run.config, assemble(run.decisions)),
    )
    return Prediction(known.memory, time)


def record(
    run: Run, request: RunRequest, known: Forecast, summary: JsonObject, cached_s: float
) -> None:
    """Store what a finished run took, for later predictions; a resumed one says too little.

    `cached_s` is the part of its time in which torch compiled what it then kept on disk.
    """
    hardware = hardware_name(run.machine, str(run.mesh.device))
    rate = summary["tokens_per_s"]
    if request.cache is None or hardware is None or run.resumed_from or not rate:
        return
    predicted = summary["predicted"] or {}
    torch, flatout = versions()
    on_cpu = run.mesh.device.type == "cpu"
    others = known.began.others_until(_cpu_times())
    done = past_run(
        run.config,
        run.decisions,
        by="train",
        recipe=run.config.name,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        torch=torch,
        world_size=run.mesh.world_size,
        is_busy=on_cpu and run.mesh.world_size == 1 and others > BUSY_CORES,
        flatout=flatout,
        estimate=known.memory.estimate if known.memory else None,
        context_gib=known.context / GIB if on_cpu else None,
        peak_gib=summary["peak_gib"],
        reserved_gib=reserved_gib(run.mesh.device),
        tokens_per_s=rate,
        mfu=summary["mfu"],
        train_s=summary["tokens"] / rate,
        score_s=(tokens_to_score(run.config, run.dataset) or 0) / (EVALUATION_COST * rate),
        wall_s=summary["wall_s"],
        cached_s=cached_s,
        predicted_gib=predicted.get("peak_gib"),
        predicted_tokens_per_s=predicted.get("tokens_per_s"),
        predicted_s=None if summary["stopped_early"] else predicted.get("wall_s"),
    )
    past_runs.keep(hardware, done, request.cache)
