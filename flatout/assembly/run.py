"""Run: everything that training works on, built from a resolved configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from flatout.assembly.parts import Decision, Readback
from flatout.assembly.recipe import Recipe
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset
from flatout.hardware import Machine
from flatout.json_io import JsonObject
from flatout.models.language_model import LanguageModel
from flatout.optimizers.loss_scale import LossScaler
from flatout.optimizers.step_guard import StepGuard
from flatout.parallel.mesh import Mesh
from flatout.progress import SILENT, Progress
from flatout.roof import Peak

if TYPE_CHECKING:
    from flatout.data.load.batches import SequenceReader
    from flatout.data.load.feed import DirectFeed, PrefetchFeed


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    path: Path
    seconds: float
    """Time from the call in the loop until it was complete."""
    blocked_s: float
    """Time that the loop spent writing it or waiting for it."""


class StateSaver(Protocol):
    """Writes checkpoints. All ranks call the same methods at the same points."""

    newest_step: int | None
    """The last step that this process saved or started to save."""

    def reserve(self, run: Run, progress: Progress = SILENT) -> int:
        """Allocate the memory for saves, before training starts; return its bytes."""

    def save(
        self,
        run: Run,
        *,
        environment: JsonObject,
        keep: int | None,
        keep_every: int | None = None,
        info: JsonObject | None = None,
        progress: Progress = SILENT,
    ) -> None:
        """Write the state or start writing it, then delete what `retention.prune` does not keep.

        `info` is stored beside the state: see checkpoint/info.py.
        Raises: RunFailed, CheckpointError.
        """

    def finished(self, progress: Progress = SILENT) -> list[Saved]:
        """Return the checkpoints completed since the last call.

        Raises: RunFailed, CheckpointError when a background save failed.
        """

    def wait(self, progress: Progress = SILENT) -> None:
        """Wait until the pending checkpoint is complete.

        Raises: RunFailed, CheckpointError when it failed.
        """

    def before_update(self) -> None:
        """Make the optimizer's step wait until the weights have been copied."""

    def close(self, progress: Progress = SILENT) -> None:
        """Wait for the pending checkpoint, without communicating with other ranks."""

    def abandon(self) -> None:
        """Give up the pending checkpoint without waiting; earlier checkpoints are not affected."""


class Pulse:
    """How much a run has done, and what it is busy with, for the watchdog."""

    def __init__(self) -> None:
        self.beats = 0
        """Micro-batches, steps and batches of evaluations; equal on all ranks that are level."""
        self.activity = "preparing"

    def beat(self) -> None:
        """Count one more piece of work."""
        self.beats += 1

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Name what the run is busy with inside; beginning and end count as work."""
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
    recipe: Recipe
    """What the speedups made of the run's parts."""
    core: LanguageModel
    """The unwrapped model, for parameter names, evaluation and sampling."""
    model: nn.Module
    """The core, compiled and wrapped: the module that training calls."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    reader: SequenceReader
    feed: DirectFeed | PrefetchFeed
    readback: Readback
    saver: StateSaver
    peak: Peak | None
    scaler: LossScaler | None = None
    guard: StepGuard = field(default_factory=StepGuard)
    """Skips the updates of bad steps."""
    left_out: Mapping[int, int] = field(default_factory=dict)
    """Positions of data that the feed leaves out, and those at which it continues."""
    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    best_val_loss: float | None = None
    best_step: int | None = None
    evaluation_due: bool = False
    """Whether the evaluation after `step` is still to be done, because a stop interrupted it."""
    resumed_from: str | None = None
    base: JsonObject | None = None
    """The weights that the adapters of a LoRA run belong to: see checkpoint/base.py."""
    rows_are_auto: bool = False
    """Whether flatout chose the rows of a micro-batch, and may choose fewer."""
    is_updating: bool = False
    """Whether the step has begun to update the weights, so that it cannot be repeated."""
    pulse: Pulse = field(default_factory=Pulse)

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

    @property
    def rows_per_device(self) -> int:
        """Sequences in one micro-batch."""
        return int(self.config.batch.rows_per_device)

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps that read the number of tokens in the training split or the whole mix."""
        return self.feed.steps_per_epoch

    @property
    def arithmetic(self) -> str:
        """Arithmetic of the matrix products: fp32, tf32, bf16 or fp16."""
        if self.recipe.precision.name != "fp32":
            return self.recipe.precision.name
        return (
            "tf32"
            if torch.get_float32_matmul_precision() == "high" and self.mesh.device.type == "cuda"
            else "fp32"
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for calling the model."""
        return self.recipe.precision.context(self.mesh.device.type)
