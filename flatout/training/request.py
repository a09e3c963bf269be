"""A request for a training run, with the machine and the data that it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.assembly.run import Run
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset
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
    """Whether the run's custom code may be imported."""
    machine: Machine
    ranks: Ranks
    device: str
    device_reason: str
    dataset: AnyDataset
    observers: Sequence[Observer]
    sample: Callable[[Run], str] | None
    cache: Path | None
    """Cache of measurements on this hardware, if any."""
    progress: Progress
