"""Plans a run: parameters, FLOPs, memory by part, what fits, rate, time, energy and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flatout.assembly.memory import Capacity, Workload, capacity_of, trace_memory
from flatout.assembly.prediction import (
    GIB,
    MemoryPrediction,
    TimePrediction,
    past_run,
    predict_time,
    runs_here,
)
from flatout.assembly.resolve import known_peak, resolve, workload_of
from flatout.assembly.selection import Decision, recipe_of
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset
from flatout.errors import HardwareError
from flatout.measure.plan.target import Target, find_data, target_of
from flatout.models.language_model import Flops, LanguageModel, model_of
from flatout.models.lora import INSIDE, require_weights, with_adapters
from flatout.ops import Ops
from flatout.progress import SILENT, Progress
from flatout.roof import Peak


@dataclass(frozen=True)
class Plan:
    """Everything that is known about a run before it starts."""

    requested: RunConfig
    config: RunConfig
    """Resolved for the target."""
    decisions: Sequence[Decision]
    target: Target
    dataset: AnyDataset | None
    workload: Workload
    parts: dict[str, int]
    """Parameters by part of the model."""
    flops: Flops
    memory: MemoryPrediction | None
    """None when a custom model cannot run on tensors without values."""
    capacity: Capacity | None
    time: TimePrediction
    peak: Peak | None
    notes: list[str]
    cache: Path | None
    """Where measurements on this hardware are."""

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if that cannot be told."""
        if self.target.is_missing:
            return False
        if self.memory is None or self.capacity is None:
            return None
        return self.memory.total <= self.capacity.free

    @property
    def available(self) -> int | None:
        """Bytes that tensors may take; None if unknown."""
        if self.capacity is None or self.memory is None:
            return None
        ratio = self.memory.reserved / max(self.memory.allocated, 1)
        return max(int((self.capacity.free - self.memory.context) / ratio), 0)

    @property
    def batch(self) -> tuple[int, int]:
        """Rows of a micro-batch, and micro-batches per step."""
        return int(self.config.batch.rows_per_device), self.config.batch.accumulate or 1


def make_plan(
    requested: RunConfig,
    machine: str | None = None,
    *,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Plan:
    """Plan a run on a named machine or this one; the dataset is used if it is here.

    Raises: UsageError, also when the vocabulary size is not known.
    """
    require_weights(requested.lora, requested.train.init_from)
    target = target_of(requested, machine)
    dataset, note = find_data(requested, progress)
    runs = runs_here(target.machine, target.device, cache)
    with progress.task("Resolving the configuration"):
        config, decisions = resolve_for(target, requested, dataset, cache)
    dtype = recipe_of(config).arithmetic(target.device)
    peak = None if target.is_missing else known_peak(target.machine, target.device, dtype)
    model_class, model_config = model_of(config)
    model = with_adapters(model_class.on_meta(model_config, Ops.plain()), config.lora)
    flops = model.flops_per_token(config.data.seq_len)
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
    if config.train.steps is None:
        notes.append("The length is not known: set train.steps or train.tokens, or name a dataset.")
    capacity = capacity_of(target.machine, target.device, target.world_size)
    return Plan(
        requested,
        config,
        decisions,
        target,
        dataset,
        workload,
        parameters_by_part(model),
        flops,
        memory,
        capacity,
        time,
        peak,
        notes,
        cache,
    )


def resolve_for(
    target: Target,
    requested: RunConfig,
    dataset: AnyDataset | None,
    cache: Path | None,
) -> tuple[RunConfig, list[Decision]]:
    """Return the configuration as `train` would resolve it on the target.

    If not even one row fits, the plan is for one row.
    """
    requested = requested.with_values({"train.device": target.device})

    def resolved(config: RunConfig) -> tuple[RunConfig, list[Decision]]:
        return resolve(
            config,
            machine=target.machine,
            dataset=dataset,
            world_size=target.world_size,
            cache=cache,
        )

    try:
        return resolved(requested)
    except HardwareError:
        if requested.batch.rows_per_device != "auto":
            raise
        return resolved(requested.with_values({"batch.rows_per_device": 1}))


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


def memory_at_peak(memory: MemoryPrediction) -> dict[str, Any]:
    """Return the parts of the predicted peak in GiB; they add up to what is allocated."""
    found, moment = memory.estimate, memory.estimate.peak
    logits = {"the loss": moment.transient, "a sharded step": found.logits}.get(moment.name, 0)
    parts = {
        "weights": found.weights,
        "gradients": moment.gradients,
        "optimizer": found.optimizer,
        "activations": moment.activations,
        "logits": logits,
        "workspace": moment.transient - logits,
        "correction": memory.allocated - found.total,
    }
    gib: dict[str, Any] = {name: size / GIB for name, size in parts.items()}
    return gib | {
        "peak_in": moment.name,
        "allocated": memory.allocated / GIB,
        "reserved": memory.reserved / GIB,
        "context": memory.context / GIB,
        "total": memory.total / GIB,
        "gradients_in_all": found.gradients / GIB,
    }
