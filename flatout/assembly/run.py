"""Run: everything that training works on, and how a resolved configuration becomes one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from flatout.assembly.choices import Decision, parts_of
from flatout.assembly.heap import keep_freed_memory
from flatout.assembly.memory import gather_dtype, memory_bytes
from flatout.assembly.parts import Parts, Readback, zero_in_place
from flatout.assembly.resolve import known_peak
from flatout.config.schema import RunConfig
from flatout.data.load.batches import BatchPlan, SequenceReader
from flatout.data.store.mix import AnyDataset
from flatout.display import memory_size
from flatout.distributed.mesh import Mesh, wrap
from flatout.distributed.pipeline import Pipeline, completed, stages_of
from flatout.errors import HardwareError
from flatout.hardware.machine import Machine
from flatout.hardware.roofline import Peak
from flatout.models.language_model import LanguageModel, allocate, model_of, new_model
from flatout.models.lora import with_adapters
from flatout.optim.groups import OptimizerParts, optimizers_of
from flatout.optim.loss_scale import LossScaler
from flatout.optim.step_guard import StepGuard
from flatout.storage.json_io import JsonObject

if TYPE_CHECKING:
    from flatout.data.load.loader import DirectLoader, PrefetchLoader


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    path: Path
    seconds: float
    """Time from the call in the loop until it was complete."""
    blocked_s: float
    """Time that the loop spent writing it or waiting for it."""


class Pulse:
    """How much a run has done, and what it is busy with, for the watchdog."""

    def __init__(self) -> None:
        self.beats = 0
        """Micro-batches, steps and batches of evaluations. Equal on ranks at the same point."""
        self.activity = "preparing"

    def beat(self) -> None:
        """Count one more piece of work."""
        self.beats += 1

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Name what the run is busy with inside. Beginning and end count as work."""
        before, self.activity = self.activity, activity
        self.beat()
        try:
            yield
        finally:
            self.activity = before
            self.beat()


@dataclass
class Run:
    """A run in progress: its fixed parts first, then the state that training changes and saves."""

    config: RunConfig
    """Fully resolved."""
    machine: Machine
    mesh: Mesh
    dataset: AnyDataset
    folder: Path
    decisions: Sequence[Decision]
    parts: Parts
    """The plain ones, and those of the speedups."""
    core: LanguageModel
    """The unwrapped model, for parameter names, evaluation and sampling."""
    model: nn.Module
    """The core, compiled and wrapped, or the pipeline of its stages: what training calls."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    reader: SequenceReader
    loader: DirectLoader | PrefetchLoader = field(init=False)
    readback: Readback
    saver: Any
    """Writes checkpoints: see checkpoint/savers.py."""
    peak: Peak | None = None
    scaler: LossScaler | None = None
    guard: StepGuard = field(default_factory=StepGuard)
    """Skips the updates of bad steps."""
    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    best_val_loss: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    largest_weight: tuple[int, float] | None = None
    """The largest absolute value of a weight, and at which step it was last looked for."""
    evaluation_due: bool = False
    """Whether the evaluation after `step` is still to be done, because a stop interrupted it."""
    resumed_from: str | None = None
    base: JsonObject | None = None
    """The weights that the adapters of a LoRA run belong to: see checkpoint/contents.py."""
    is_updating: bool = False
    """Whether the step has begun to update the weights: fewer rows do not help there."""
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def speedups(self) -> list[str]:
        """The speedups that are on."""
        return [decision.name for decision in self.decisions if decision.on]

    @property
    def last_step(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.train.steps or 0

    @property
    def tokens_per_step(self) -> int:
        """Nominal tokens of one optimizer step, summed over ranks."""
        return self.config.batch.tokens_per_step or 0

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizers update.

        Under fully_shard these are the sharded ones, even while the model shows gathered ones.
        """
        return [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def num_parameters(self) -> int:
        """Return the number of weights of the model, with those of other ranks."""
        with completed(self.core):
            return sum(parameter.numel() for parameter in self.core.parameters())

    def flops_per_token(self, seq_len: int) -> float:
        """Return the training FLOPs per token of the model, with those of other ranks."""
        with completed(self.core):
            return float(self.core.flops_per_token(seq_len).causal_exact)

    @property
    def rows_per_device(self) -> int:
        """Sequences in one micro-batch."""
        return int(self.config.batch.rows_per_device)

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps that read the number of tokens in the training split or the whole mix."""
        return self.loader.steps_per_epoch

    @property
    def arithmetic(self) -> str:
        """Arithmetic of the matmuls: fp32, tf32, bf16 or fp16."""
        return self.parts.arithmetic(self.mesh.device.type)

    def grad_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch, which may be the step's last.

        Copies synchronise their gradients with the last one. A sharded model adds up its shards in
        each micro-batch, since whole gradients would take the memory that it saves. Its copies
        synchronise theirs with the last one.
        """
        model: Any = self.model
        if hasattr(model, "set_requires_all_reduce"):
            model.set_requires_all_reduce(is_last)
        return nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for calling the model."""
        return self.parts.precision.context(self.mesh.device.type)


def build(
    config: RunConfig,
    *,
    machine: Machine,
    mesh: Mesh,
    dataset: AnyDataset,
    folder: Path,
    decisions: Sequence[Decision],
    draws: bool = True,
) -> Run:
    """Return the run that a resolved configuration describes, at step 0.

    Weights are initialised with train.seed, identically on every rank. Without `draws` they are
    arbitrary, because a checkpoint replaces them.
    """
    parts = parts_of(config)
    if mesh.device.type == "cpu":
        keep_freed_memory()
    random.seed(config.train.seed)
    np.random.seed(config.train.seed % 2**32)
    torch.manual_seed(config.train.seed)
    set_deterministic(config.train.deterministic)
    torch.set_float32_matmul_precision(parts.matmul)
    core, model = _model(config, parts, machine, mesh, draws=draws)
    if model is not core and mesh.device_mesh is None:
        parts.zero_grad = zero_in_place
    run = Run(
        config=config,
        machine=machine,
        mesh=mesh,
        dataset=dataset,
        folder=folder,
        decisions=decisions,
        parts=parts,
        core=core,
        model=model,
        optimizers=optimizers_of(
            config, core, OptimizerParts(parts.optimizer, parts.newton_schulz)
        ),
        reader=parts.reader(dataset.tokenizer),
        readback=parts.readback(),
        saver=parts.state_saver(),
        scaler=LossScaler(parts.precision.loss_scale) if parts.precision.loss_scale else None,
        guard=StepGuard(most=config.train.max_bad_steps, model=core, device=mesh.device),
    )
    run.loader = make_loader(run)
    run.parts.zero_grad(run.trained())
    run.peak = known_peak(machine, str(mesh.device), run.arithmetic)
    return run


def set_deterministic(wanted: bool) -> None:
    """Make torch use deterministic operations, or any, if it does not yet.

    The call imports torch's compiler, which takes a second.
    """
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)


def _model(
    config: RunConfig, parts: Parts, machine: Machine, mesh: Mesh, *, draws: bool
) -> tuple[LanguageModel, nn.Module]:
    """Return the model, and the module that training calls in its place.

    No process ever holds more than its shards of the weights and one whole tensor.
    """
    model_class, model_config = model_of(config)
    least_bytes = 4 * model_class.num_parameters(model_config) // config.parallel.unit
    what, device = "weights", config.train.device
    if mesh.offloads:  # where its gradients are, too
        least_bytes, what, device = 2 * least_bytes, "weights and gradients", "cpu"
    free_bytes = memory_bytes(machine, device, mesh.local_world_size)
    if least_bytes > free_bytes:
        raise HardwareError(
            f"The model's {what} alone take {memory_size(least_bytes)}, "
            f"and only {memory_size(free_bytes)} are available.",
            fix="Choose a smaller model: lower model.num_layers, model.d_model "
            "or model.vocab_size.",
        )
    core = with_adapters(new_model(config, parts.ops()), config.lora)
    autocast = partial(parts.precision.context, mesh.device.type)
    stages = stages_of(core, mesh, autocast) if mesh.pipeline > 1 else []
    data = config.data
    mesh.share_rows(core, seq_len=data.seq_len)
    mesh.share_layers(core, seq_len=data.seq_len)
    is_sharded = mesh.device_mesh is not None
    if not is_sharded:
        allocate(core, mesh.device, draws=draws)
    if parts.activations is not None:
        parts.activations(core)
    if parts.compilation is not None:
        parts.compilation(core, mesh)
    model = wrap(core, mesh, gathers=gather_dtype(model_class, parts), stages=stages)
    if is_sharded:
        allocate(core, mesh.device, draws=draws, weights_device=mesh.weights_device)
    return core, Pipeline(core, stages, mesh) if stages else model


def make_loader(run: Run) -> DirectLoader | PrefetchLoader:
    """Return a data loader of the steps of a run, at position 0."""
    config, mesh = run.config, run.mesh
    plan = BatchPlan(
        seq_len=config.data.seq_len,
        rows_per_device=run.rows_per_device,
        accumulate=config.batch.accumulate or 1,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        seed=config.train.seed,
        document_mask=config.data.document_mask,
        prefetch=config.data.prefetch,
        device=str(mesh.device),
        by_tokens=config.batch.by_tokens,
    )
    return run.parts.loader(run.parts.batching(run.dataset.split("train"), plan, run.reader))
