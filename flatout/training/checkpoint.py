"""Checkpoints: everything a resume needs, in one folder that is whole or absent.

checkpoints/step-N/
├── model-RRRRR.safetensors       rank R's slices of the weights
├── optimizer-RRRRR.safetensors   rank R's slices of the optimizers' tensors
├── index.json                    every tensor's dtype and shape, and where each slice of it lies
├── state.json                    every other value of state.STATE, those of each rank apart
└── manifest.json                 bytes and SHA-256 of every file; written last, then the folder gets its name in one rename

One rank is the special case of several. No pickle is ever read or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flatout.progress import SILENT, Progress
from flatout.training.catalog import best, latest, prune, steps, verify

if TYPE_CHECKING:
    from flatout.run import Run

__all__ = ["best", "latest", "load", "prune", "read_weights", "save", "steps", "verify", "weights_sha256"]


def save(run: Run, *, environment: Mapping[str, Any] | None = None, progress: Progress = SILENT) -> Path:
    """Write the run's state as `step-N`, N being `run.step`, and return that folder. Every rank calls it."""
    raise NotImplementedError


def load(run: Run, checkpoint: Path, *, environment: Mapping[str, Any] | None = None, progress: Progress = SILENT) -> list[str]:
    """Put a checkpoint's state into a freshly built run, and return the differences that should be said aloud. Every rank calls it."""
    raise NotImplementedError


def read_weights(checkpoint: Path, *, progress: Progress = SILENT) -> dict[str, Tensor]:
    """Return every weight whole, by the name that the model's own state_dict uses, whatever number of ranks wrote it."""
    raise NotImplementedError


def weights_sha256(checkpoint: Path) -> str:
    """Return one digest of all weights: equal for equal weights, whatever number of ranks wrote them."""
    raise NotImplementedError
