"""Plans a run: parameters, FLOPs, memory by part, what fits, rate, time, energy and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from flatout.assembly.memory import Capacity, capacity_of, most_rows, smallest_machine, trace_memory
from flatout.assembly.prediction import (
    GIB,
    MemoryPrediction,
    TimePrediction,
    past_run,
    predict_time,
    runs_here,
    speedups_on,
)
from flatout.assembly.preflight import open_dataset, require_machine
from flatout.assembly.resolve import known_peak, workload_of
from flatout.assembly.selection import recipe_of
from flatout.config.schema import RunConfig
from flatout.data.store.manifest import MANIFEST
from flatout.data.store.mix import AnyDataset
from flatout.hardware import Machine, pick_device, probe
from flatout.measure.plan.changes import PlannedRun, Target
from flatout.measure.plan.report import Change, Plan
from flatout.models.language_model import LanguageModel, model_of
from flatout.models.lora import INSIDE, require_weights, with_adapters
from flatout.ops import Ops
from flatout.progress import SILENT, Progress
from flatout.transfer.urls import is_url

DOES_NOT_FIT = "none: it does not fit"
"""Where the rate of a run that does not fit comes from."""


def make_plan(
    requested: RunConfig,
    machine: str | None = None,
    *,
    price_per_hour: float | None = None,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Plan:
    """Plan a run on a named machine or this one; the dataset is used if it is here.

    Raises: UsageError, also when the vocabulary size is not known.
    """
    require_weights(requested.lora, requested.train.init_from)
    place = target_machine(requested, machine)
    dataset, note = find_data(requested, progress)
    target = Target(*place, dataset, cache)
    runs = runs_here(target.machine, target.device, cache)
    with progress.task("Resolving the configuration"):
        config, decisions = target.resolve(requested)
    dtype = recipe_of(config).arithmetic(target.device)
    peak = None if target.is_missing else known_peak(target.machine, target.device, dtype)
    model_class, model_config = model_of(config)
    model = with_adapters(model_class.on_meta(model_config, Ops.plain()), config.lora)
    parameters, flops = parameters_by_part(model), model.flops_per_token(config.data.seq_len)
    this, workload = past_run(config, decisions, target.world_size), workload_of(config)
    notes = [note] if note else []
    with progress.task("Tracing the memory of a step"):
        context = psutil.Process().memory_info().rss
        memory, problem = trace_memory(this, config, workload, runs=runs, context=context)
    if problem:
        notes.append(f"The memory cannot be predicted: {problem}")
    time = predict_time(
        this,
        config,
        flops_per_token=float(flops.causal_exact),
        peak=peak,
        runs=runs,
        dataset=dataset,
        memory=memory,
    )
    steps = config.train.steps
    if steps is None:
        notes.append("The length is not known: set train.steps or train.tokens, or name a dataset.")
    with progress.task("Trying what fits"):
        run = PlannedRun(target, requested, config, workload)
        room = memory_fields(memory, run, speedups_on(decisions))
    if room["fits"] is False and not target.is_missing:  # a run without room has no rate
        time = TimePrediction(None, None, None, DOES_NOT_FIT, None)
    row = target.machine.row if target.device.startswith("cuda") else None
    power = row.power_w if row else None
    hours = None if time.wall_s is None else time.wall_s / 3600
    watts = power.value * target.world_size if power else None
    rows, accumulate = int(config.batch.rows_per_device), config.batch.accumulate or 1
    return Plan(
        recipe=config.name,
        machine=target.describe(),
        device=target.device,
        world_size=target.world_size,
        params=sum(parameters.values()),
        params_by_part=parameters,
        flops_per_token=float(flops.causal_exact),
        flops_per_token_palm=float(flops.palm),
        rows_per_device=rows,
        accumulate=accumulate,
        steps=steps,
        tokens=None if steps is None else steps * (config.batch.tokens_per_step or 0),
        speedups=speedups_on(decisions),
        notes=notes,
        **room,
        tokens_per_s=time.tokens_per_s,
        tokens_per_s_from=time.source,
        mfu=time.mfu,
        mfu_of=f"{peak.tflops:,.4g} TFLOP/s ({peak.source})" if peak else None,
        wall_s=time.wall_s,
        wall_s_error=time.error,
        kwh=None if watts is None or hours is None else watts * hours / 1000,
        kwh_from=f"{power.value:g} W per GPU ({power.source})" if power else None,
        cost=None if price_per_hour is None or hours is None else price_per_hour * hours,
    )


def target_machine(config: RunConfig, machine: str | None) -> tuple[Machine, str, int]:
    """Return the machine that `--machine` names, or this one, the device and its processes.

    Raises: ConfigError.
    """
    if machine is not None:
        named = require_machine(config, machine)
        return named, "cuda", len(named.gpus)
    here, parallel = probe(), config.parallel
    replicas = 1 if parallel.replicate == "auto" else parallel.replicate
    device = config.train.device
    if device == "auto":
        device, _ = pick_device(device, here)
    devices = config.train.devices or 1
    if devices == "all":
        devices = len(here.gpus) if device.startswith("cuda") else 1
    return here, device, max(replicas * parallel.shard, devices)


def find_data(config: RunConfig, progress: Progress) -> tuple[AnyDataset | None, str | None]:
    """Return the dataset of a configuration if it is on this machine, or why it is not used.

    Raises: DataError when it is damaged or too short.
    """
    paths = list(config.data.mix or ([config.data.path] if config.data.path else []))
    why = None if paths else "No dataset is set"
    for path in paths:
        if is_url(path):
            why = why or f"{path} is not downloaded"
        elif not (Path(path).expanduser() / MANIFEST).exists():
            why = why or f"{path} is not a dataset yet"
    if why:
        return None, f"{why}, so the time leaves out the evaluations."
    return open_dataset(config, progress=progress), None


def parameters_by_part(model: LanguageModel) -> dict[str, int]:
    """Return the parameters of the embedding, of each child of the blocks, of the head, the rest.

    Adapters (LoRA) are a part of their own. A tied head counts as the embedding.
    """
    kinds, found = model.parameter_kinds(), Counter[str]()
    for name, parameter in model.named_parameters():
        words, kind = name.split("."), kinds[name]
        if INSIDE in name:
            part = "adapters"
        elif words[0] == "blocks" and len(words) > 3:
            part = f"blocks.{words[2]}"
        else:
            part = kind if kind in ("embedding", "head") else "other"
        found[part] += parameter.numel()
    return dict(found)


def memory_fields(
    memory: MemoryPrediction | None, run: PlannedRun, speedups: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of a plan about memory: the need, whether it fits, and what would."""
    target, workload = run.target, run.workload
    capacity = capacity_of(target.machine, target.device, target.world_size)
    fits, largest, smallest, changes = None, None, None, list[Change]()
    if memory and capacity:
        fits = memory.total <= capacity.free
        ratio = memory.reserved / max(memory.allocated, 1)
        available = max(int((capacity.free - memory.context) / ratio), 0)
        largest = most_rows(workload, available)
        if not fits:
            changes = replace(run, available=available).changes(speedups)
    if target.is_missing:
        fits = False
    if memory and fits is False and not largest:
        smallest = smallest_machine(workload)
    return {
        "memory": memory_at_peak(memory, capacity) if memory else None,
        "memory_from": memory.source if memory else None,
        "memory_error": memory.error if memory else None,
        "peak_gib": memory.peak_gib if memory else None,
        "fits": fits,
        "largest_rows_per_device": largest,
        "changes": changes,
        "smallest_machine": smallest,
    }


def memory_at_peak(memory: MemoryPrediction, capacity: Capacity | None) -> dict[str, Any]:
    """Return the parts of the predicted peak in GiB; they add up to what is allocated."""
    found, moment = memory.estimate, memory.estimate.peak
    logits = {"the loss": moment.transient, "a sharded step": found.logits}.get(moment.name, 0)
    sizes = {
        "weights": found.weights,
        "gradients": moment.gradients,
        "optimizer": found.optimizer,
        "activations": moment.activations,
        "logits": logits,
        "workspace": moment.transient - logits,
        "correction": memory.allocated - found.total,
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "context": memory.context,
        "total": memory.total,
        "gradients_in_all": found.gradients,
    }
    more = {"peak_in": moment.name, "available": capacity.free / GIB if capacity else None}
    return {name: size / GIB for name, size in sizes.items()} | more
