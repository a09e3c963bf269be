"""Plans a run: parameters, FLOPs, memory by part and what fits, rate, time, energy and cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from flatout.assembly.choices import Decision, adding, all_speedups, parts_of
from flatout.assembly.measured import past_run, runs_here, speedups_on
from flatout.assembly.memory import free_bytes, workload_of
from flatout.assembly.parts import divisors
from flatout.assembly.preflight import open_dataset, require_machine
from flatout.assembly.resolve import checkpointing_notes, known_peak, resolve, tokens_per_step
from flatout.config.schema import RunConfig
from flatout.config.sections import ParallelConfig
from flatout.data.store.manifest import MANIFEST
from flatout.data.store.mix import AnyDataset
from flatout.display import amount
from flatout.errors import FlatoutError
from flatout.hardware.machine import GIB, Machine, as_torch_sees, pick_device, probe
from flatout.hardware.roofline import Peak
from flatout.measure.plan.prediction import (
    MemoryPrediction,
    TimePrediction,
    most_rows,
    predict_memory,
    predict_time,
)
from flatout.measure.plan.result import Alternative, Change, Plan
from flatout.models.language_model import LanguageModel, model_of
from flatout.models.lora import parameters_by_part, require_weights, with_adapters
from flatout.ops import Ops
from flatout.progress import SILENT, Progress
from flatout.storage.remote.urls import is_url
from flatout.training.init_from import require_source

LEAST_SAVING = 0.02
"""Changes that save less of the memory are omitted."""
LONG = 8_192
"""Tokens of rows from which several GPUs may share one."""
LEAST_BPE = 10_000
"""Ids of a vocabulary whose losses compare with those of GPT-2's: not bytes or characters."""
CRITICAL_BATCH = (
    "A step has {}. In the runs of Kaplan et al. 2020, the critical batch size was 271.7 K tokens "
    "at a loss of 4 and 2.5 M tokens at 2.5 (2e8 / loss^(1/0.21)): much larger steps need more "
    "tokens for the same loss, much smaller ones more steps."
)
"""Source: Kaplan et al. 2020, arXiv:2001.08361, a fit to the gradient noise of transformers on
WebText2, as McCandlish et al. 2018, arXiv:1812.06162, measure it.
"""
TOUCH_MEMORY = {
    "activations",
    "attention",
    "cross_entropy",
    "linear",
    "moments",
    "optimizer",
    "precision",
}
"""Parts of a run that may need less memory."""


def make_plan(
    requested: RunConfig,
    machine: str | None = None,
    *,
    rows: Sequence[int] = (),
    price_per_hour: float | None = None,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Plan:
    """Plan a run on a named machine or this one. The dataset is used if it is here.

    `rows` are micro-batches to compare.

    Raises: UsageError, also when the vocabulary size is not known.
    """
    require_weights(requested.lora, requested.train.init_from)
    require_source(requested.train.init_from or "", progress)
    place, (dataset, note) = target_machine(requested, machine), find_data(requested, progress)
    target = Target(*place, dataset, cache)
    found = meshes(target, requested) if machine is not None else []
    chosen = dict(key.split("=") for mesh in found[:1] for key in mesh.overrides)
    requested = requested.with_values(chosen)
    with progress.task("Resolving the configuration"):
        config, decisions = target.resolve(requested)
    target = replace(target, context=psutil.Process().memory_info().rss)
    model = model_on_meta(config)
    parameters, flops = parameters_by_part(model), model.flops_per_token(config.data.seq_len)
    with progress.task("Tracing the memory of a step"):
        memory, problem, time = target.predict(config, decisions)
    notes = [*filter(None, (note, target.note())), *checkpointing_notes(decisions)]
    if problem:
        notes.append(f"The memory cannot be predicted: {problem}")
    unit = (config.batch.tokens_per_step or 0) // int(config.batch.rows_per_device)
    tried = [{"batch.rows_per_device": each, "batch.tokens_per_step": each * unit} for each in rows]
    with progress.task("Planning other micro-batches"):
        batches = target.alternatives(config, tried)
    steps, tokens = config.train.steps, tokens_per_step(config, dataset)
    if steps is None:
        notes.append("The length is not known: set train.steps or train.tokens, or name a dataset.")
    fits, largest, changes = target.fits(memory), None, list[Change]()
    if memory and target.free:
        with progress.task("Trying what fits"):
            reserved = memory.reserved / max(memory.estimate.total, 1)
            room = max((target.free - memory.context) / reserved, 0)  # besides the process
            largest = most_rows(workload_of(config), int(room))
            changes = [] if fits else changes_of(target, requested, config, memory, largest)
    if fits is False:  # a run without room has no rate
        time = TimePrediction(None, None, None, "none: it does not fit", None)
    if (config.model.vocab_size or 0) >= LEAST_BPE:
        notes.append(CRITICAL_BATCH.format(amount(tokens, "tokens")))
    peak, row = target.peak(config), target.machine.row
    power = row.power_w if row and target.device.startswith("cuda") else None
    hours = None if time.wall_s is None else time.wall_s / 3600
    watts = power.value * target.world_size if power else None
    return Plan(
        recipe=config.name,
        machine=target.describe(),
        device=target.device,
        world_size=target.world_size,
        params=sum(parameters.values()),
        params_by_part=parameters,
        flops_per_token=float(flops.causal_exact),
        flops_per_token_palm=float(flops.palm),
        rows_per_device=int(config.batch.rows_per_device),
        accumulate=config.batch.accumulate or 1,
        steps=steps,
        tokens=None if steps is None else int(steps * tokens),
        **(memory_at_peak(memory, target.free) if memory else {}),
        fits=False if target.is_missing else fits,
        largest_rows_per_device=largest,
        tokens_per_s=time.tokens_per_s,
        tokens_per_s_from=time.source,
        mfu=time.mfu,
        mfu_of=f"{peak.tflops:,.4g} TFLOP/s ({peak.source})" if peak else None,
        wall_s=time.wall_s,
        wall_s_error=time.error,
        kwh=None if watts is None or hours is None else watts * hours / 1000,
        kwh_from=f"{power.value:g} W per GPU ({power.source})" if power else None,
        cost=None if price_per_hour is None or hours is None else price_per_hour * hours,
        speedups=speedups_on(decisions),
        changes=changes,
        batches=batches,
        meshes=found,
        notes=notes,
    )


@dataclass(frozen=True)
class Target:
    """The machine and the data that a run is planned for. Neither needs to be here."""

    machine: Machine
    device: str
    """cpu or cuda, or what the configuration asks for if this machine has none."""
    world_size: int
    """Processes, one per GPU."""
    dataset: AnyDataset | None
    cache: Path | None
    """Where measurements on this hardware are."""
    context: int = 0
    """Bytes of this process before it builds a model, which count on a CPU."""

    @property
    def is_missing(self) -> bool:
        """Whether the machine lacks the device."""
        return self.device.startswith("cuda") and not self.machine.gpus

    @property
    def free(self) -> int | None:
        """The free memory of one process. None if the machine lacks the device."""
        return free_bytes(self.machine, self.device, self.world_size)

    def peak(self, config: RunConfig) -> Peak | None:
        """Return the rate of matmuls in the arithmetic of a resolved run, if it is known."""
        dtype = parts_of(config).arithmetic(self.device)
        return None if self.is_missing else known_peak(self.machine, self.device, dtype)

    def fits(self, memory: MemoryPrediction | None) -> bool | None:
        """Return whether that memory is free. None if one of the two is not known."""
        free = self.free
        return memory.total <= free if memory and free else None

    def note(self) -> str | None:
        """Return what is assumed of a machine that is not here, or is not fully named."""
        each = self.machine.gpus_per_node
        if self.is_missing:
            return (
                "This machine has no GPU, so nothing is known of memory and rate. Name the one to "
                "plan for: --machine H100."
            )
        if self.world_size <= each or self.machine.network_gbit_per_s:
            return None
        return (
            "No network is named, so communication between machines counts as inside them: name "
            f"it, as in '{self.world_size // each}x{each} H100, 400 Gb/s'."
        )

    def describe(self) -> str:
        """Return the machine in a few words."""
        if self.is_missing:
            return "a GPU that is not here"
        if not self.device.startswith("cuda"):
            return self.machine.describe().partition(";")[0]
        row, gpu = self.machine.row, self.machine.gpus[0]
        known = f" ({row.name})" if row else " (no data sheet: peak rate and power unknown)"
        return f"{self.world_size}x {gpu.name}{known}"

    def resolve(self, requested: RunConfig) -> tuple[RunConfig, list[Decision]]:
        """Return the configuration as `train` would resolve it there."""
        return resolve(
            requested.with_values({"train.device": self.device}),
            machine=self.machine,
            dataset=self.dataset,
            world_size=self.world_size,
            cache=self.cache,
        )

    def predict(
        self, config: RunConfig, decisions: Sequence[Decision]
    ) -> tuple[MemoryPrediction | None, str | None, TimePrediction]:
        """Return the memory of a resolved run, or why it cannot be predicted, and its time."""
        this = past_run(config, decisions, self.world_size, dataset=self.dataset)
        runs = runs_here(self.machine, self.device, self.cache)
        memory, problem = predict_memory(this, workload_of(config), context=self.context)
        flops = model_on_meta(config).flops_per_token(config.data.seq_len)
        time = predict_time(
            this,
            config,
            flops_per_token=float(flops.causal_exact),
            peak=self.peak(config),
            runs=runs,
            machine=self.machine,
            dataset=self.dataset,
            memory=memory,
        )
        return memory, problem, time

    def alternatives(
        self, requested: RunConfig, tried: Iterable[dict[str, Any]]
    ) -> list[Alternative]:
        """Return the run with each of the values in turn, unless it is rejected there."""
        found = []
        for values in tried:
            with suppress(FlatoutError):
                config, decisions = self.resolve(requested.with_values(values))
                memory, _, time = self.predict(config, decisions)
                fits = self.fits(memory)
                one = Alternative(
                    overrides=[f"{key}={value}" for key, value in values.items()],
                    rows_per_device=int(config.batch.rows_per_device),
                    need_gib=memory and memory.total / GIB,
                    fits=fits,
                    tokens_per_s=None if fits is False else time.tokens_per_s,
                    source=time.source,
                )
                found.append(one)
        return found


def meshes(target: Target, requested: RunConfig) -> list[Alternative]:
    """Return arrangements of several processes, the fastest that fit first, unless one is set.

    Weights are sharded over none, a machine or all GPUs. Rows are shared where they are long,
    layers inside a machine. The model is divided where there are several machines.
    """
    if target.world_size == 1 or requested.parallel != ParallelConfig():
        return []
    world, each = target.world_size, min(target.machine.gpus_per_node, target.world_size)
    contexts = [1] if requested.data.seq_len < LONG else [1, 2, 4, 8]
    keys = [f"parallel.{name}" for name in ("shard", "context", "tensor", "pipeline")]
    sizes = [
        (shard // tensor, context, tensor, 1)
        for shard, context, tensor in product(sorted({1, each, world}), contexts, sorted({1, each}))
        if 1 in (context, tensor) and (context * tensor == 1 or (shard > 1 and not shard % context))
    ]
    stages = (2, 4, 8, 16) if world > each else ()
    sizes += [(world // (n * tensor), 1, tensor, n) for n in stages for tensor in {1, each}]
    tried: list[dict[str, Any]] = [
        {key: n for key, n in zip(keys, one, strict=True) if n > 1} or {keys[0]: 1} for one in sizes
    ]
    interleaved = {"parallel.pipeline_schedule": "interleaved"}
    tried += [mesh | interleaved for mesh in tried if keys[-1] in mesh]
    found = target.alternatives(requested, tried)
    return sorted(found, key=lambda mesh: (-(mesh.tokens_per_s or 0.0), mesh.need_gib or 0.0))


def changes_of(
    target: Target, requested: RunConfig, config: RunConfig, memory: MemoryPrediction, largest: int
) -> list[Change]:
    """Return the changes that save memory: those that fit first, then those that need least.

    `largest` is the largest micro-batch that fits.
    """
    workload, batch, need_gib = workload_of(config), config.batch, memory.total / GIB
    rows, accumulate = int(batch.rows_per_device), batch.accumulate or 1
    leanest = workload.model_class.leanest(workload.model_config)
    fewer = next(divisors(rows * accumulate, min(largest, rows - 1)), 0)
    others: list[dict[str, Any]] = [
        {f"model.{key}": value for key, value in leanest.items()},
        {"batch.rows_per_device": fewer, "batch.accumulate": rows * accumulate // max(fewer, 1)},
        {"parallel.shard": target.world_size if config.parallel.shard == 1 else 0},
        {"parallel.offload": "cpu" if workload.on_gpu and not workload.offloads else 0},
    ]
    tried = [
        ({"speedups": adding(requested.speedups, [one.name])}, one.tolerance.kind)
        for one in all_speedups()
        if TOUCH_MEMORY & one.sets
    ]
    pinned = requested.model_copy(update={"batch": batch})
    found = [
        Change(
            **dict(one),
            saves_gib=need_gib - one.need_gib,
            tolerance="different, equal in the mean" if kind == "statistical" else None,
        )
        for values, kind in (*tried, *((each, "exact") for each in others if all(each.values())))
        for one in target.alternatives(pinned, [values])
        if one.need_gib and one.need_gib < (1 - LEAST_SAVING) * need_gib
    ]
    return sorted(found, key=lambda change: (not change.fits, change.need_gib))


def model_on_meta(config: RunConfig) -> LanguageModel:
    """Return the model of a resolved run, with its adapters and without values."""
    model_class, model_config = model_of(config)
    return with_adapters(model_class.on_meta(model_config, Ops.plain()), config.lora)


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
    here = as_torch_sees(here, device)
    devices = config.train.devices or 1
    if devices == "all":
        devices = len(here.gpus) if device.startswith("cuda") else 1
    return here, device, max(replicas * parallel.unit, devices)


def find_data(config: RunConfig, progress: Progress) -> tuple[AnyDataset | None, str | None]:
    """Return the dataset of a configuration if it is on this machine, or why it is not used.

    Raises: DataError when it is damaged or too short.
    """
    paths = list(config.data.mix or filter(None, [config.data.path]))
    absent = (
        path for path in paths if is_url(path) or not (Path(path).expanduser() / MANIFEST).exists()
    )
    missing = next((f"{path} is not a dataset here" for path in absent), None)
    if missing or not paths:
        return None, f"{missing or 'No dataset is set'}, so the time omits the evaluations."
    return open_dataset(config), None


def memory_at_peak(memory: MemoryPrediction, free: int | None) -> dict[str, Any]:
    """Return the memory of a plan, in GiB: the parts add up to what is allocated."""
    found, moment = memory.estimate, memory.estimate.peak
    logits = min(found.logits, moment.transient) if moment.name == "the loss" else 0
    sizes = {
        "weights": found.weights,
        "gradients": moment.gradients,
        "optimizer": found.optimizer,
        "activations": moment.activations,
        "logits": logits,
        "workspace": moment.transient - logits,
        "allocated": found.total,
        "reserved": memory.reserved,
        "context": memory.context,
        "total": memory.total,
        "gradients_in_all": found.gradients,
        "host": found.host,
    }
    gib = {name: size / GIB for name, size in sizes.items()}
    available = free / GIB if free else None
    return {
        "memory": {**gib, "peak_in": moment.name, "available": available},
        "memory_from": memory.source,
        "memory_error": memory.error,
        "peak_gib": memory.peak_gib,
    }
