"""What travels through training: the request for a run, and the session of one that is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset
from flatout.distributed.rendezvous import Ranks
from flatout.hardware.machine import CpuTimes, Machine
from flatout.progress import Progress
from flatout.training.metrics.observers import Observer

if TYPE_CHECKING:
    from flatout.assembly.run import Run
    from flatout.training.metrics.log import Log


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
    began: CpuTimes
    """What all processes had computed when the run started."""


@dataclass(frozen=True)
class Session:
    """A run in progress, its log, and what may stop it."""

    run: Run
    log: Log
    """Also holds `progress`, where the run reports to the user."""
    stop: Callable[[Run], bool] = lambda _run: False
    """Called before each step: whether to end the loop. All ranks get the same answer."""
    drop: Callable[[Run, int], bool] | None = None
    """Called before batch 2 and later of a step or an evaluation, with its number: whether to drop
    that work. All ranks get the same answer."""
    sample: Callable[[Run], str] | None = None
    """Generates a short text with the model in its current state."""
