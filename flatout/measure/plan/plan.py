"""Plans a run: parameters, FLOPs, memory by part and what fits, rate, time, energy and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flatout.assembly.memory import (
    Capacity,
    Workload,
    capacity_of,
    estimate,
    most_rows,
    smaller_batch,
    smallest_machine,
    trace_memory,
)
from flatout.assembly.prediction import (
    GIB,
    MemoryPrediction,
    PastRun,
    TimePrediction,
    gains_here,
    past_run,
    predict_time,
    runs_here,
    speedups_on,
)
from flatout.assembly.preflight import open_dataset, require_machine
from flatout.assembly.resolve import (
    checkpointing_notes,
    flops_per_token,
    known_peak,
    may_checkpoint,
    resolve,
    workload_of,
)
from flatout.assembly.selection import (
    Decision,
    adding,
    all_speedups,
    assemble,
    memory_savers,
    recipe_of,
    speedup_named,
)
from flatout.config.schema import RunConfig
from flatout.config.sections import ParallelConfig
from flatout.data.store.manifest import MANIFEST
from flatout.data.store.mix import AnyDataset
from flatout.errors import ConfigError, FlatoutError, HardwareError
from flatout.hardware.machine import Machine, pick_device, probe
from flatout.hardware.roofline import Peak
from flatout.measure.plan.report import Change, MeshChoice, MicroBatch, Plan
from flatout.models.language_model import LanguageModel, model_of
from flatout.models.lora import INSIDE, require_weights, with_adapters
from flatout.ops import Ops, cross_entropy
from flatout.progress import SILENT, Progress
from flatout.storage.remote.urls import is_url

LEAST_SAVING = 0.02
"""Changes that save less of the memory are omitted."""
LONG = 8_192
"""Tokens of rows from which several GPUs may share one."""
NOT_MEASURED = "not measured"
TOUCH_MEMORY = {
    "activations",
    "gather_dtype",
    "low_precision",
    "moments",
    "ops.attention",
    "ops.cross_entropy",
    "optimizer",
    "precision",
}
"""Slots of speedups that may need less memory."""
DOES_NOT_FIT = "none: it does not fit"
"""Where the rate of a run that does not fit comes from."""


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
    place = target_machine(requested, machine)
    dataset, note = find_data(requested, progress)
    target = Target(*place, dataset, cache)
    runs = runs_here(target.machine, target.device, cache)
    found = meshes(requested, target, runs) if machine is not None else []
    chosen = [key.split("=") for each in found[:1] for key in each.overrides]
    requested = requested.with_values(dict(chosen))
    with progress.task("Resolving the configuration"):
        config, decisions = target.resolve(requested)
    dtype = recipe_of(config).arithmetic(target.device)
    peak = None if target.is_missing else known_peak(target.machine, target.device, dtype)
    model_class, model_config = model_of(config)
    model = with_adapters(model_class.on_meta(model_config, Ops.plain()), config.lora)
    parameters, flops = parameters_by_part(model), model.flops_per_token(config.data.seq_len)
    notes = [*filter(None, (note, target.network_note())), *checkpointing_notes(decisions)]
    predict = partial(
        predicted,
        decisions=decisions,
        target=target,
        flops_per_token=float(flops.causal_exact),
        peak=peak,
        runs=runs,
        context=psutil.Process().memory_info().rss,
    )
    with progress.task("Tracing the memory of a step"):
        memory, problem, time = predict(config)
    if problem:
        notes.append(f"The memory cannot be predicted: {problem}")
    batches = micro_batches(rows, config, target, predict, progress)
    steps = config.train.steps
    if steps is None:
        notes.append("The length is not known: set train.steps or train.tokens, or name a dataset.")
    with progress.task("Trying what fits"):
        run = PlannedRun(target, requested, config, workload_of(config))
        room = memory_fields(memory, run, speedups_on(decisions))
    if room["fits"] is False and not target.is_missing:  # a run without room has no rate
        time = TimePrediction(None, None, None, DOES_NOT_FIT, None)
    row = target.machine.row if target.device.startswith("cuda") else None
    power = row.power_w if row else None
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
        tokens=None if steps is None else steps * (config.batch.tokens_per_step or 0),
        speedups=speedups_on(decisions),
        notes=notes,
        batches=batches,
        meshes=found,
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


Predicted = tuple[MemoryPrediction | None, str | None, TimePrediction]
"""The memory of a run, or why it cannot be predicted, and its time."""


def predicted(
    config: RunConfig,
    *,
    decisions: list[Decision],
    target: Target,
    flops_per_token: float,
    peak: Peak | None,
    runs: Sequence[PastRun],
    context: int,
) -> Predicted:
    """Return the predicted memory and time of a resolved configuration on its target."""
    this, workload = past_run(config, decisions, target.world_size), workload_of(config)
    memory, problem = trace_memory(this, config, workload, runs=runs, context=context)
    time = predict_time(
        this,
        config,
        flops_per_token=flops_per_token,
        peak=peak,
        runs=runs,
        machine=target.machine,
        dataset=target.dataset,
        memory=memory,
    )
    return memory, problem, time


def meshes(requested: RunConfig, target: Target, runs: Sequence[PastRun]) -> list[MeshChoice]:
    """Return arrangements of several processes, the fastest that fit first, unless one is set.

    Weights are sharded over none, a machine or all GPUs. Rows are shared where they are long,
    layers inside a machine.
    """
    if target.world_size == 1 or requested.parallel != ParallelConfig():
        return []
    world, each = target.world_size, min(target.machine.gpus_per_node, target.world_size)
    contexts = [1] if requested.data.seq_len < LONG else [1, 2, 4, 8]
    found = []
    for shard, context, tensor in product(sorted({1, each, world}), contexts, sorted({1, each})):
        values = {"parallel.shard": shard // tensor, "parallel.context": context}
        if context > 1 and (shard % context or shard == 1):
            continue
        if tensor > 1:
            if context > 1 or shard == 1:
                continue
            values["parallel.tensor"] = tensor
        try:
            config, decisions = target.resolve(requested.with_values(values))
        except (ConfigError, HardwareError):
            continue
        capacity = capacity_of(target.machine, target.device, world)
        dtype = recipe_of(config).arithmetic(target.device)
        model_class, model_config = model_of(config)
        flops = model_class.count_flops(model_config, config.data.seq_len)
        memory, _, time = predicted(
            config,
            decisions=decisions,
            target=target,
            flops_per_token=float(flops.causal_exact),
            peak=known_peak(target.machine, target.device, dtype),
            runs=runs,
            context=0,
        )
        found.append(
            MeshChoice(
                overrides=[f"{key}={size}" for key, size in values.items() if size > 1]
                or ["parallel.shard=1"],
                rows_per_device=int(config.batch.rows_per_device),
                need_gib=memory and memory.total / GIB,
                fits=memory.total <= capacity.free if memory and capacity else None,
                tokens_per_s=time.tokens_per_s,
                source=time.source,
            )
        )

    def rank(one: MeshChoice) -> tuple[bool, float]:
        """Put the fastest that fit first, then those that need least."""
        spills = one.fits is False
        return spills, (one.need_gib or 0.0) if spills else -(one.tokens_per_s or 0.0)

    return sorted(found, key=rank)


def micro_batches(
    rows: Sequence[int],
    config: RunConfig,
    target: Target,
    predict: Callable[[RunConfig], Predicted],
    progress: Progress,
) -> list[MicroBatch]:
    """Return what each of these micro-batches needs, and its rate if it fits."""
    capacity, found = capacity_of(target.machine, target.device, target.world_size), []
    for each in rows:
        per_step = each * (config.batch.accumulate or 1) * config.data.seq_len * target.world_size
        batch = {"batch.rows_per_device": each, "batch.tokens_per_step": per_step}
        with progress.task(f"Planning {each:,} rows"):
            need, _, time = predict(config.with_values(batch))
        if need is None:
            continue
        fits = need.total <= capacity.free if capacity else None
        rate = None if fits is False else time.tokens_per_s
        facts = {"rows_per_device": each, "need_gib": need.total / GIB, "fits": fits}
        found.append(MicroBatch(**facts, tokens_per_s=rate))
    return found


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
    return here, device, max(replicas * parallel.shard * parallel.tensor, devices)


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
        return None, f"{why}, so the time omits the evaluations."
    return open_dataset(config, progress=progress), None


def parameters_by_part(model: LanguageModel) -> dict[str, int]:
    """Return the parameters of the embedding, of each child of the blocks, of the head, the rest.

    Adapters (LoRA) are a separate part. A tied head counts as the embedding.
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
    fits = memory.total <= capacity.free if memory and capacity else None
    largest, changes = None, list[Change]()
    if memory and capacity:
        ratio = memory.reserved / max(memory.allocated, 1)
        available = max(int((capacity.free - memory.context) / ratio), 0)
        largest = most_rows(workload, available)
        tried = replace(run, available=available, ratio=ratio, context=memory.context)
        changes = [] if fits else tried.changes(speedups)
    fits = False if target.is_missing else fits
    smallest = None
    if memory and fits is False and not largest:
        requested = run.requested.with_values({"train.device": target.device})
        is_leaner = may_checkpoint(requested, speedups)
        if is_leaner:  # as on a machine where nothing fits without it
            workload = workload_of(
                run.config, assemble([*speedups, memory_savers(target.device)[-1]])
            )
        smallest = smallest_machine(workload)
        smallest = smallest and smallest + (", with activation checkpointing" if is_leaner else "")
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
    """Return the parts of the predicted peak in GiB. They add up to what is allocated."""
    found, moment = memory.estimate, memory.estimate.peak
    logits = min(found.logits, moment.transient) if moment.name == "the loss" else 0
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
        "host": found.host,
    }
    available = capacity.free / GIB if capacity else None
    gib = {name: size / GIB for name, size in sizes.items()}
    return {**gib, "peak_in": moment.name, "available": available}


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

    def network_note(self) -> str | None:
        """Return what is assumed of the network between machines, if it is not named."""
        each = self.machine.gpus_per_node
        if self.world_size <= each or self.machine.network_gbit_per_s:
            return None
        return (
            "No network is named, so communication between machines counts as inside them: name "
            f"it, as in '{self.world_size // each}x{each} H100, 400 Gb/s'."
        )

    @property
    def is_missing(self) -> bool:
        """Whether the machine lacks the device."""
        return self.device.startswith("cuda") and not self.machine.gpus

    def describe(self) -> str:
        """Return the machine in a few words."""
        if self.is_missing:
            return "a GPU that is not here"
        if self.device == "cpu":
            return self.machine.describe().partition(";")[0]
        row, gpu = self.machine.row, self.machine.gpus[0]
        known = f" ({row.name})" if row else " (no data sheet: peak rate and power unknown)"
        return f"{self.world_size}x {gpu.name}{known}"

    def resolve(self, requested: RunConfig) -> tuple[RunConfig, list[Decision]]:
        """Return the configuration as `train` would resolve it there.

        If not even one row fits, the plan is for one row.
        """
        requested = requested.with_values({"train.device": self.device})
        known = partial(
            resolve,
            machine=self.machine,
            dataset=self.dataset,
            world_size=self.world_size,
            cache=self.cache,
        )
        try:
            return known(requested)
        except HardwareError:
            if requested.batch.rows_per_device != "auto":
                raise
            return known(requested.with_values({"batch.rows_per_device": 1}))


@dataclass(frozen=True)
class PlannedRun:
    """A run that may not fit into the memory of its target."""

    target: Target
    requested: RunConfig
    config: RunConfig
    """Resolved for the target."""
    workload: Workload
    available: int = 0
    """Bytes that tensors may take."""
    ratio: float = 1.0
    """What the allocator reserves, as a multiple of what tensors take."""
    context: int = 0
    """Bytes of the process besides."""

    def changes(self, on: Sequence[str]) -> list[Change]:
        """Return the changes that save memory, the largest saving first. Then a set that fits.

        `on` are the speedups that are on. A set is built when no single change is enough: sharding
        over all GPUs, the speedups that save most, one by one, then fewer rows.
        """
        leaner: dict[str, Change] = {}
        for speedup in all_speedups():
            change = None
            if speedup.name not in on and TOUCH_MEMORY & speedup.fills.keys():
                change = self._try({}, [speedup.name])
            if change and _saves(change, self._need_gib):
                leaner[speedup.name] = change
        model = dict(self.workload.model_class.leanest(self.workload.model_config))
        sharding: dict[str, Any] = {}
        if self.target.world_size > 1 and self.workload.num_shards == 1:
            sharding = {"parallel.shard": self.target.world_size}
        singles = [self._try({}, fewer_rows=True), *leaner.values()]
        offload: dict[str, Any] = {}
        if self.workload.on_gpu and not self.workload.offloads:
            offload = {"parallel.offload": "cpu"}
        leanest = {f"model.{key}": value for key, value in model.items()}
        for values in (leanest, sharding, offload):
            singles += [self._try(values)] if values else []
        found = [change for change in singles if change and change.saves_gib > 0]
        found.sort(key=lambda change: (not change.fits, change.need_gib))
        if found and found[0].fits:
            return found
        chosen: list[str] = []
        last = self._try(sharding)
        for name in sorted(leaner, key=lambda name: leaner[name].need_gib):
            more = self._try(sharding, [*chosen, name])
            if more and (last is None or _saves(more, last.need_gib)):
                chosen, last = [*chosen, name], more
            if chosen and last and last.fits:
                return [last, *found]
        fewer = self._try(sharding, chosen, fewer_rows=True) if chosen or sharding else None
        return [fewer, *found] if fewer else found

    @property
    def _batch(self) -> tuple[int, int]:
        return int(self.config.batch.rows_per_device), self.config.batch.accumulate or 1

    @property
    def _need_gib(self) -> float:
        return self._in_all_gib(estimate(self.workload, *self._batch).total)

    def _in_all_gib(self, tensors: int) -> float:
        return (tensors * self.ratio + self.context) / GIB

    def _try(
        self, values: Mapping[str, Any], names: Sequence[str] = (), *, fewer_rows: bool = False
    ) -> Change | None:
        """Return the change to other settings and more speedups. None when that cannot run.

        With `fewer_rows`, the micro-batch is the largest smaller one that fits and divides the
        step. None without one.
        """
        values, batch = {**values}, self._batch
        if names:
            values = {"speedups": adding(self.requested.speedups, names), **values}
        step = {
            "batch.tokens_per_step": self.config.batch.tokens_per_step,
            "batch.rows_per_device": batch[0],
            "batch.accumulate": batch[1],
        }
        try:
            config, _ = self.target.resolve(self.requested.with_values(step | values))
            workload = workload_of(config)
        except FlatoutError:
            return None
        if fewer_rows:
            sequences = batch[0] * batch[1]
            rows = smaller_batch(workload, sequences, self.available, batch[0] - 1)
            if not rows:
                return None
            batch = rows, sequences // rows
            values |= {"batch.rows_per_device": rows, "batch.accumulate": batch[1]}
        speedups, target = [speedup_named(name) for name in names], self.target
        weak = ", ".join(s.name for s in speedups if s.tolerance.kind == "statistical")
        flops, speed = partial(flops_per_token, config), NOT_MEASURED
        gains = gains_here(target.machine, target.device, target.cache, flops)
        if names and all(name in gains for name in names):
            speed = "measured: " + "; ".join(f"{name}: {gains[name].describe()}" for name in names)
        elif workload.transforms != self.workload.transforms:
            more = training_flops(workload) / training_flops(self.workload) - 1
            speed = f"{more:.0%} more FLOPs, from recomputing, but the time is {NOT_MEASURED}"
        need = estimate(workload, *batch).total
        return Change(
            overrides=[f"{key}={value}" for key, value in values.items()],
            saves_gib=self._need_gib - self._in_all_gib(need),
            need_gib=self._in_all_gib(need),
            fits=need <= self.available,
            speed=speed,
            tolerance=f"{weak}: different losses, equal in the mean" if weak else None,
        )


def _saves(change: Change, need_gib: float) -> bool:
    return change.need_gib < (1 - LEAST_SAVING) * need_gib


@lru_cache(maxsize=16)
def training_flops(workload: Workload) -> int:
    """Return the FLOPs of one sequence, forward and backward, with what is recomputed.

    Blocks of one kind are counted once, so that a deep model takes no longer.
    """
    ops = replace(workload.ops, cross_entropy=cross_entropy.fused)  # whole, so that all is counted

    def flops_of(call: Callable[[], Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            call().sum().backward()  # type: ignore[no-untyped-call]
        return int(counter.get_total_flops())

    with FakeTensorMode():
        model = workload.model_class(workload.model_config, ops)
        for transform in workload.transforms:
            model = transform(model, None)
        tokens_BT = torch.zeros(1, workload.seq_len, dtype=torch.int64)
        hidden_BTD = torch.zeros_like(model.embed(tokens_BT), requires_grad=True)
        block_of = {repr(block): block for block in model.blocks}
        flops = {
            name: flops_of(partial(block, hidden_BTD, None)) for name, block in block_of.items()
        }

        def loss() -> Tensor:
            normed_BTD, weight_VD = model.head(hidden_BTD)
            return ops.cross_entropy(normed_BTD, weight_VD, tokens_BT)[0]

        ends = flops_of(partial(model.embed, tokens_BT)) + flops_of(loss)
    return ends + sum(flops[repr(block)] for block in model.blocks)
