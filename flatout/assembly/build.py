"""Build the model, the optimizers and the feed of a resolved configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from flatout.assembly.parts import Decision
from flatout.assembly.plain import zero_in_place
from flatout.assembly.recipe import Recipe
from flatout.assembly.resolve import known_peak, memory_bytes, ops_of
from flatout.assembly.run import Run
from flatout.assembly.selection import assemble
from flatout.config.schema import RunConfig
from flatout.config.sections import TrainConfig
from flatout.data.load.batches import BatchPlan, SequenceReader
from flatout.data.load.leaving_out import LeavingOut
from flatout.data.store.mix import AnyDataset
from flatout.errors import HardwareError
from flatout.hardware import Machine
from flatout.models.language_model import LanguageModel, model_of
from flatout.models.lora import with_adapters
from flatout.models.meta import allocate, on_meta
from flatout.optimizers.groups import OptimizerParts, optimizers_of
from flatout.optimizers.loss_scale import LossScaler
from flatout.optimizers.step_guard import StepGuard
from flatout.parallel.mesh import Mesh, wrap
from flatout.progress import readable_memory
from flatout.roof import Peak

if TYPE_CHECKING:
    from flatout.data.load.feed import DirectFeed, PrefetchFeed


PeakOf = Callable[[Machine, str, str], Peak | None]
"""(machine, device, dtype) -> the peak rate of a device."""


def build(
    config: RunConfig,
    *,
    machine: Machine,
    mesh: Mesh,
    dataset: AnyDataset,
    folder: Path,
    decisions: Sequence[Decision],
    left_out: Mapping[int, int] | None = None,
    peak: PeakOf = known_peak,
    draws: bool = True,
) -> Run:
    """Return the run that a resolved configuration describes, at step 0.

    Weights are initialised with train.seed, identically on every rank; then each rank's generators
    get a different seed. `left_out` maps positions in the data to those to continue at instead.
    `peak` finds the peak rate of the device. Without `draws` the weights are arbitrary, because a
    checkpoint replaces them.
    """
    recipe = assemble(decisions)
    recipe.allocator()
    _seed(config.train.seed)
    set_deterministic(config.train.deterministic)
    torch.set_float32_matmul_precision(recipe.matmul)
    core, model = _model(config, recipe, machine, mesh, draws=draws)
    parts = OptimizerParts(recipe.optimizer, recipe.ops.newton_schulz)
    optimizers = optimizers_of(config, core, parts)
    reader = recipe.reader(dataset.tokenizer)
    feed = make_feed(config, recipe, mesh, dataset, reader, left_out or {})
    _seed(config.train.seed + 1_000_003 * (mesh.rank + 1))
    run = Run(
        config=config,
        machine=machine,
        mesh=mesh,
        dataset=dataset,
        folder=folder,
        decisions=decisions,
        recipe=recipe if model is core else recipe.with_parts(zero_grad=zero_in_place),
        core=core,
        model=model,
        optimizers=optimizers,
        reader=reader,
        feed=feed,
        readback=recipe.readback(),
        saver=recipe.state_saver(),
        peak=None,
        scaler=LossScaler(recipe.precision.loss_scale) if recipe.precision.loss_scale else None,
        guard=_guard(config.train, core, mesh),
        left_out=left_out or {},
    )
    run.recipe.zero_grad(run.trained())
    run.peak = peak(machine, str(mesh.device), run.arithmetic)
    return run


def set_deterministic(wanted: bool) -> None:
    """Make torch use deterministic operations, or any, if it does not yet.

    The call imports torch's compiler, which takes a second.
    """
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)


def _guard(train: TrainConfig, core: LanguageModel, mesh: Mesh) -> StepGuard:
    return StepGuard(
        most=train.max_bad_steps,
        spikes=train.skip_spikes,
        model=core,
        device=mesh.device,
    )


def _model(
    config: RunConfig, recipe: Recipe, machine: Machine, mesh: Mesh, *, draws: bool
) -> tuple[LanguageModel, nn.Module]:
    """Return the model, and the module that training calls in its place.

    No process ever holds more than its shards of the weights and one whole tensor.
    """
    model_class, model_config = model_of(config)
    weights_bytes = 4 * model_class.num_parameters(model_config) // mesh.shard
    free_bytes = memory_bytes(machine, config.train.device, mesh.local_world_size)
    if weights_bytes > free_bytes:
        raise HardwareError(
            f"The model's weights alone take {readable_memory(weights_bytes)}, "
            f"and only {readable_memory(free_bytes)} are available.",
            fix="Choose a smaller model: lower model.num_layers, model.d_model "
            "or model.vocab_size.",
        )
    core = with_adapters(on_meta(config, ops_of(recipe)), config.lora)
    model: nn.Module = core
    is_sharded = mesh.device_mesh is not None
    if not is_sharded:
        allocate(core, mesh.device, draws=draws)
    for transform in recipe.transforms():
        model = transform(model, mesh)
    model = wrap(model, mesh, gathers=recipe.gather_dtype)
    if is_sharded:
        allocate(core, mesh.device, draws=draws)
    return core, model


def make_feed(
    config: RunConfig,
    recipe: Recipe,
    mesh: Mesh,
    dataset: AnyDataset,
    reader: SequenceReader,
    left_out: Mapping[int, int],
) -> DirectFeed | PrefetchFeed:
    """Return a feed of the steps of a resolved configuration, at position 0.

    `left_out` maps positions in the data to those to continue at instead.
    """
    plan = BatchPlan(
        seq_len=config.data.seq_len,
        rows_per_device=int(config.batch.rows_per_device),
        accumulate=config.batch.accumulate or 1,
        rank=mesh.rank,
        world_size=mesh.world_size,
        seed=config.train.seed,
        document_mask=config.data.document_mask,
        prefetch=config.data.prefetch,
        device=str(mesh.device),
    )
    steps = recipe.batching(dataset.split("train"), plan, reader)
    return recipe.feed(LeavingOut(steps, left_out) if left_out else steps)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
