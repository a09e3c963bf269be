"""What a training run was asked to be, and what it has to run on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatout.config.schema import RunConfig
from flatout.data.store.mix import MixedDataset
from flatout.data.store.shards import Dataset
from flatout.hardware import Machine
from flatout.parallel.rendezvous import Ranks
from flatout.progress import Progress


@dataclass(frozen=True)
class RunRequest:
    """A configuration before it is resolved, its run directory, and the machine and data to use."""

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
    cache: Path | None
    """Holds what was measured on this hardware, if anything."""
    progress: Progress
