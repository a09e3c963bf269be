"""Run: a recipe made real. `resolve` settles every `auto` once; `build` makes model, optimizers and
feed from the result.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from flatout.assembly.memory import Workload
from flatout.assembly.preflight import check_names
from flatout.assembly.recipe import (
    MicroBatchPlan,
    Precision,
    Recipe,
    Transform,
    as_python_collects,
    dropped,
    with_every_micro_batch,
)
from flatout.assembly.selection import Decision, assemble, select
from flatout.config.schema import RunConfig, TrainConfig
from flatout.data.load.batches import FeedPlan
from flatout.data.store.mix import MixedDataset, parts_of
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, HardwareError
from flatout.hardware import ASSUMED_MFU, Machine, Peak, peak_tflops
from flatout.models.language_model import LanguageModel, model_of
from flatout.ops import Ops, scan
from flatout.ops.attention import most_documents
from flatout.optimizers.groups import OptimizerParts, optimizers_of
from flatout.optimizers.loss_scale import LossScaler
from flatout.parallel.data import wrap
from flatout.parallel.mesh import Mesh, replicas

if TYPE_CHECKING:
    from flatout.data.load.batches import WindowReader
    from flatout.data.load.feed import DirectFeed, PrefetchFeed

DEFAULT_TOKENS_PER_STEP = 65_536
"""Tokens per optimiser step where a configuration states none of the three batch keys."""


known_peak = functools.cache(peak_tflops)
"""The peak, measured at most once a process."""


@dataclass
class Run:
    """One run at work. Its settled parts come first; then what training changes, all of it saved by
    a checkpoint.
    """

    config: RunConfig
    """Fully resolved."""
    machine: Machine
    mesh: Mesh
    dataset: Dataset | MixedDataset
    folder: Path
    decisions: Sequence[Decision]
    precision: Precision
    core: LanguageModel
    """The model itself: names, evaluation of one's own, sampling."""
    model: nn.Module
    """What training calls: the core, compiled and wrapped."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    windows: WindowReader
    feed: DirectFeed | PrefetchFeed
    readback: Any
    saver: Any
    peak: Peak | None
    exchange: Callable[[nn.Module, bool], AbstractContextManager[Any]] = with_every_micro_batch
    """(model, is it the last) -> the context of a micro-batch: when processes exchange gradients.
    """
    clear_gradients: Callable[[Iterable[nn.Parameter]], None] = dropped
    """Called after each step."""
    collector: Callable[[], AbstractContextManager[Callable[[int], None]]] = as_python_collects
    """The context of the loop; what it yields is called after each step, with the step."""
    convolutions: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of the loop, in which cuDNN chooses."""
    scaler: LossScaler | None = None
    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    best_val_loss: float | None = None
    best_step: int | None = None
    resumed_from: str | None = None

    @property
    def last_step(self) -> int:
        """Optimiser steps of the whole run."""
        return self.config.train.steps or 0

    @property
    def tokens_per_step(self) -> int:
        """Nominal tokens of one optimiser step, over all ranks."""
        return self.config.batch.tokens_per_step or 0

    def trained(self) -> list[nn.Parameter]:
        """Return what the optimisers hold: under fully_shard the split weights, though the model
        may show gathered ones at the moment.
        """
        return [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    @property
    def rows_per_device(self) -> int:
        """Windows of one micro-batch."""
        return int(self.config.batch.rows_per_device)

    @property
    def steps_per_epoch(self) -> float:
        """Optimiser steps that read as many tokens as the training split has, or all sets of a mix
        together.
        """
        return self.feed.steps_per_epoch

    @property
    def arithmetic(self) -> str:
        """What the matrix products are computed in: fp32, tf32, bf16 or fp16."""
        if self.precision.name != "fp32":
            return self.precision.name
        return (
            "tf32"
            if torch.get_float32_matmul_precision() == "high" and self.mesh.device.type == "cuda"
            else "fp32"
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the model is called."""
        return self.precision.context(self.mesh.device.type)


def resolve(
    config: RunConfig,
    *,
    machine: Machine,
    dataset: Dataset | MixedDataset,
    world_size: int,
    local_world_size: int | None = None,
) -> tuple[RunConfig, list[Decision]]:
    """Settle everything a configuration leaves open, and the speedups with their reasons.

    `config.train.device` must be settled already. Of the processes, `local_world_size` are on this
    machine; None is all.
    Raises: ConfigError when sizes contradict each other.
    """
    config = _resolve_model(config, dataset)
    config = _resolve_batch(config, world_size)
    asked, config = config.train, _resolve_length(config, dataset)
    check_names(config)
    peak = known_peak(
        machine, config.train.device, "fp32" if config.train.device == "cpu" else "bf16"
    )
    minutes = expected_minutes(config, world_size * peak.tflops * ASSUMED_MFU) if peak else None
    config = config.with_values({"parallel.replicate": replicas(config.parallel, world_size)})
    decisions = select(config, machine, device=config.train.device, minutes=minutes)
    recipe = assemble(decisions)
    if asked.steps is None and "batching" in recipe.filled_by:
        config = _length_as_read(config, asked, recipe, dataset)
    precision = recipe.part("precision")
    on = {decision.name for decision in decisions if decision.on}
    batch: dict[str, Any] = {}
    if config.batch.rows_per_device == "auto":
        rows_per_rank = (config.batch.tokens_per_step or 0) // (config.data.seq_len * world_size)
        plan = MicroBatchPlan(
            workload_of(config, recipe),
            rows_per_rank,
            config.train.device,
            memory_bytes(machine, config.train.device, local_world_size or world_size),
        )
        rows = recipe.part("micro_batch")(plan)
        batch = {"batch.rows_per_device": rows, "batch.accumulate": rows_per_rank // rows}
        on.discard(
            recipe.filled_by.get("micro_batch", "")
        )  # its work is done: the rows are written down
    settled = {
        "train.precision": precision.name,
        "speedups": [d.name for d in decisions if d.name in on] or "none",
    }
    return config.with_values(batch | settled), decisions


def steps_stated(
    config: RunConfig, asked: TrainConfig, recipe: Recipe, dataset: Dataset | MixedDataset
) -> int:
    """Return the optimiser steps of a length that is stated as steps, tokens or epochs, in a run
    that is resolved otherwise.
    """
    config = config.with_values(
        {f"train.{key}": getattr(asked, key) for key in ("steps", "tokens", "epochs")}
    )
    is_read = asked.steps is None and "batching" in recipe.filled_by
    config = (
        _length_as_read(config, asked, recipe, dataset)
        if is_read
        else _resolve_length(config, dataset)
    )
    return config.train.steps or 1


def expected_minutes(config: RunConfig, tflops: float) -> float | None:
    """Return how long the matrix products of a run take at a rate over all its processes; None
    where its length follows from the data.
    """
    config = _resolve_batch(config, 1) if config.batch.tokens_per_step is None else config
    tokens = (
        config.train.tokens
        if config.train.steps is None
        else config.train.steps * (config.batch.tokens_per_step or 0)
    )
    if tokens is None:
        return None
    model_class, model_config = model_of(config, vocab_size=config.model.vocab_size or 1)
    flops = model_class.count_flops(model_config, config.data.seq_len)
    return float(flops.causal_exact) * tokens / (tflops * 1e12) / 60


def workload_of(config: RunConfig, recipe: Recipe) -> Workload:
    """Return what the need for memory of a resolved configuration follows from, but the number of
    rows.
    """
    model_class, model_config = model_of(config)
    dtype = recipe.part("precision").dtype()
    ops = ops_of(recipe)
    if (
        ops.scan is scan.reference
    ):  # the chunks keep 2% less, and following 16,384 tokens one by one takes minutes
        ops = replace(ops, scan=scan.chunked)
    return Workload(
        model_class,
        model_config,
        config.data.seq_len,
        ops,
        dtype,
        moments=recipe.part("moments"),
        with_momentum=frozenset({"hidden"} if config.optim.kind == "muon" else ()),
        num_shards=config.parallel.shard,
        whole_gradients="exchange" in recipe.filled_by,
        transforms=tuple(
            transform.apply
            for transform in recipe.ordered_transforms()
            if transform.stage in ("low-precision", "checkpointing")
        ),
        document_mask=config.data.document_mask,
    )


def memory_bytes(machine: Machine, device: str, local_world_size: int) -> int:
    """Return what one rank may use: what is free on its GPU, or its share of the memory of a
    machine whose processes compute on the CPU.
    """
    if device.startswith("cuda") and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0])
    gib = (
        machine.gpus[0].memory_gib
        if device.startswith("cuda") and machine.gpus
        else machine.memory_gib / local_world_size
    )
    return int(gib * 2**30)


def ops_of(recipe: Recipe) -> Ops:
    """Return the functions a model is built with."""
    return Ops(**{field.name: recipe.part(f"ops.{field.name}") for field in fields(Ops)})


def _resolve_model(config: RunConfig, dataset: Dataset | MixedDataset) -> RunConfig:
    """Take the vocabulary from the data where none is stated, and write out the model's own
    defaults.
    """
    vocab_size = config.model.vocab_size or dataset.vocab_size
    if vocab_size < dataset.vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the vocabulary of {parts_of(dataset)[0].dataset.place}, {dataset.vocab_size}.",
            fix="Leave model.vocab_size out, or prepare the data with the model's own tokenizer.",
        )
    _, model_config = model_of(config, vocab_size=vocab_size)
    return config.with_values(
        {f"model.{key}": value for key, value in model_config.model_dump(mode="json").items()}
    )


def _resolve_batch(config: RunConfig, world_size: int) -> RunConfig:
    """Work out the third of tokens_per_step, rows_per_device and accumulate, where two are stated."""
    batch, seq_len = config.batch, config.data.seq_len
    tokens, rows, accumulate = batch.tokens_per_step, batch.rows_per_device, batch.accumulate
    row_tokens = seq_len * world_size
    if tokens is None and rows != "auto":
        tokens = rows * (accumulate or 1) * row_tokens
    if tokens is None:
        tokens = max(DEFAULT_TOKENS_PER_STEP // row_tokens, 1) * row_tokens * (accumulate or 1)
    per_micro_batch = (
        row_tokens * (1 if rows == "auto" else rows) * (1 if accumulate is None else accumulate)
    )
    if tokens % per_micro_batch or (accumulate and rows != "auto" and tokens != per_micro_batch):
        nearest = (
            max(round(tokens / per_micro_batch), 1) * per_micro_batch
            if not (accumulate and rows != "auto")
            else per_micro_batch
        )
        parts = f"data.seq_len={seq_len}" + (f" x {world_size} processes" if world_size > 1 else "")
        parts += f" x batch.rows_per_device={rows}" if rows != "auto" else ""
        parts += f" x batch.accumulate={accumulate}" if accumulate else ""
        raise ConfigError(
            f"batch.tokens_per_step={tokens} does not fit {parts}.",
            fix=f"Set batch.tokens_per_step={nearest}.",
        )
    if rows == "auto" and accumulate is not None:
        rows = tokens // (row_tokens * accumulate)
    values: dict[str, Any] = {"batch.tokens_per_step": tokens, "batch.rows_per_device": rows}
    if rows != "auto":
        values["batch.accumulate"] = tokens // (row_tokens * rows)
    return config.with_values(values)


def epoch_tokens(dataset: Dataset | MixedDataset, seq_len: int) -> int:
    """Return the tokens of one pass over the training split, of a mix those of all its sets: whole
    windows only.
    """
    return dataset.split("train").num_windows(seq_len) * seq_len


def _resolve_length(config: RunConfig, dataset: Dataset | MixedDataset) -> RunConfig:
    """Turn tokens or epochs into optimiser steps."""
    train, tokens_per_step = config.train, config.batch.tokens_per_step or 1
    if train.steps is not None:
        return config
    tokens = train.tokens or (train.epochs or 1.0) * epoch_tokens(dataset, config.data.seq_len)
    return config.with_values({"train.steps": max(math.ceil(tokens / tokens_per_step), 1)})


def _length_as_read(
    config: RunConfig, asked: TrainConfig, recipe: Recipe, dataset: Dataset | MixedDataset
) -> RunConfig:
    """Turn tokens or epochs into optimiser steps of a reader that has its own: padded ones, which
    hold fewer tokens.
    """
    windows = (config.batch.tokens_per_step or 0) // config.data.seq_len
    plan = FeedPlan(
        config.data.seq_len,
        windows,
        1,
        rank=0,
        world_size=1,
        seed=0,
        document_mask=False,
        prefetch=0,
        device="cpu",
    )
    steps = recipe.part("batching")(dataset.split("train"), plan, None)
    epochs = asked.tokens / steps.tokens_per_epoch if asked.tokens else asked.epochs or 1.0
    return config.with_values({"train.steps": max(math.ceil(epochs * steps.steps_per_epoch), 1)})


def for_world_size(config: RunConfig, world_size: int) -> RunConfig:
    """Return a resolved configuration for another number of processes: the same steps, cut
    differently.

    The micro-batch keeps its rows, or takes the most that divide a process's smaller share.
    Raises: ConfigError when a step's windows cannot be shared out.
    """
    windows = (config.batch.tokens_per_step or 0) // config.data.seq_len
    if windows % world_size or world_size % config.parallel.shard:
        raise ConfigError(
            f"A step of {windows} windows cannot be shared by {world_size} processes, split {config.parallel.shard} ways.",
            fix=f"Use a number of processes that divides {windows} and that parallel.shard divides.",
        )
    share = windows // world_size
    rows = next(
        rows
        for rows in range(min(int(config.batch.rows_per_device), share), 0, -1)
        if share % rows == 0
    )
    replicate = world_size // config.parallel.shard
    return config.with_values(
        {
            "batch.rows_per_device": rows,
            "batch.accumulate": share // rows,
            "parallel.replicate": replicate,
        }
    )


def build(
    config: RunConfig,
    *,
    machine: Machine,
    mesh: Mesh,
    dataset: Dataset | MixedDataset,
    folder: Path,
    decisions: Sequence[Decision],
) -> Run:
    """Make the run that a resolved configuration describes, at step 0.

    Weights are drawn with train.seed on every rank alike; afterwards each rank's generators are
    seeded apart.
    """
    recipe = assemble(decisions)
    recipe.part("allocator")()
    precision: Precision = recipe.part("precision")
    _seed(config.train.seed)
    torch.use_deterministic_algorithms(config.train.deterministic)
    torch.set_float32_matmul_precision(recipe.part("matmul"))
    core, model = _model(config, recipe, machine, mesh)
    parts = OptimizerParts(recipe.part("optimizer"), recipe.part("ops.newton_schulz"))
    optimizers = optimizers_of(config, core, parts)
    windows, feed = _feed(config, recipe, mesh, dataset)
    _seed(config.train.seed + 1_000_003 * (mesh.rank + 1))
    run = Run(
        config=config,
        machine=machine,
        mesh=mesh,
        dataset=dataset,
        folder=folder,
        decisions=decisions,
        precision=precision,
        core=core,
        model=model,
        optimizers=optimizers,
        windows=windows,
        feed=feed,
        readback=recipe.part("logging")(),
        saver=recipe.part("checkpointing")(),
        peak=None,
        exchange=recipe.part("exchange"),
        clear_gradients=recipe.part("gradients"),
        collector=recipe.part("collector"),
        convolutions=recipe.part("convolutions"),
        scaler=LossScaler(precision.loss_scale) if precision.loss_scale else None,
    )
    run.clear_gradients(run.trained())
    run.peak = known_peak(machine, str(mesh.device), run.arithmetic)
    return run


def _model(
    config: RunConfig, recipe: Recipe, machine: Machine, mesh: Mesh
) -> tuple[LanguageModel, nn.Module]:
    model_class, model_config = model_of(config)
    _require_room(
        4 * model_class.num_parameters(model_config),
        memory_bytes(machine, config.train.device, mesh.local_world_size),
    )
    core = model_class(model_config, ops_of(recipe)).to(mesh.device)
    shard = Transform("shard", functools.partial(wrap, gathers=recipe.part("gathers")))
    model = core
    for transform in [*recipe.ordered_transforms(), shard]:
        model = transform.apply(model, mesh)
    return core, model


def _require_room(weights_bytes: int, there_bytes: int) -> None:
    if weights_bytes > there_bytes:
        raise HardwareError(
            f"The model's weights alone take {weights_bytes / 2**30:,.1f} GiB, and there are {there_bytes / 2**30:,.1f} GiB.",
            fix="Choose a smaller model: lower model.num_layers, model.d_model or model.vocab_size.",
        )


def _feed(
    config: RunConfig, recipe: Recipe, mesh: Mesh, dataset: Dataset | MixedDataset
) -> tuple[Any, Any]:
    plan = FeedPlan(
        seq_len=config.data.seq_len,
        rows_per_device=int(config.batch.rows_per_device),
        accumulate=config.batch.accumulate or 1,
        rank=mesh.rank,
        world_size=mesh.world_size,
        seed=config.train.seed,
        document_mask=config.data.document_mask,
        prefetch=config.data.prefetch,
        device=str(mesh.device),
        most_documents=most_documents(recipe.part("ops.attention")),
    )
    reader = recipe.part("windows")
    windows = reader(dataset.tokenizer) if "windows" not in recipe.filled_by else reader()
    return windows, recipe.part("feed")(
        recipe.part("batching")(dataset.split("train"), plan, windows)
    )


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
