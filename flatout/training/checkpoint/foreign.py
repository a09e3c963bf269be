"""Load the weights of another program's model into a run, tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flatout.architectures.source import ForeignWeights
from flatout.errors import CheckpointError
from flatout.models.meta import offset_of
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint.base import WEIGHTS
from flatout.training.checkpoint.tensors import local_part
from flatout.training.checkpoint.weights import initial_weights

if TYPE_CHECKING:
    from flatout.assembly.run import Run


def load_foreign(run: Run, weights: ForeignWeights, progress: Progress = SILENT) -> None:
    """Copy every tensor into a newly built run. Every rank calls it and keeps its part.

    Memory: one tensor at a time, besides the model.
    Raises: CheckpointError when a tensor cannot be read or has another shape.
    """
    targets = initial_weights(run.core)
    size = sum(target.numel() for target in targets.values())
    with progress.task(f"Loading {weights.path.name}", total=size) as task, torch.no_grad():
        for key, target in targets.items():
            name = key.removeprefix(WEIGHTS)
            values = weights.read(name)
            if values.shape != target.shape:
                raise CheckpointError(
                    f"{name} of {weights.path} has the shape {list(values.shape)} and the model's "
                    f"{list(target.shape)}.",
                    fix="Get all files again from where the model was published.",
                )
            part, start = local_part(target), offset_of(target)
            box = tuple(
                slice(low, low + count) for low, count in zip(start, part.shape, strict=True)
            )
            part.copy_(values[box])
            task.advance(target.numel())
