"""What a training run was asked to be, and what it has to run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.assembly.run import Run
from flatout.config.schema import RunConfig
from flatout.data.store.mix import MixedDataset
from flatout.data.store.shards import Dataset
from flatout.hardware import Machine
from flatout.parallel.rendezvous import Ranks
from flatout.progress import Progress
from flatout.training.metrics.observers import Observer


@dataclass(frozen=True)
class RunRequest:
    """The arguments of `run_training`, with the machine and the data that the run uses."""

    config: RunConfig
    folder: Path
    resume: str
    """auto, never, or a checkpoint or run to resume from."""
    trust_code: bool
    """Whether the run may import its own code."""
    machine: Machine
    ranks: Ranks
    device: str
    device_reason: str
    dataset: Dataset | MixedDataset
    observers: Sequence[Observer]
    sample: Callable[[Run], str] | None
    cache: Path | None
    """Holds what was measured on this hardware, if anything."""
    progress: Progress
