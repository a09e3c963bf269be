"""The machine and the data that a run is planned for; neither needs to be here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatout.assembly.preflight import open_dataset, require_machine
from flatout.config.schema import RunConfig
from flatout.data.store.manifest import MANIFEST
from flatout.data.store.mix import AnyDataset
from flatout.hardware import Machine, pick_device, probe
from flatout.progress import Progress
from flatout.transfer.urls import is_url


@dataclass(frozen=True)
class Target:
    """Where a run is planned to train."""

    machine: Machine
    device: str
    """cpu or cuda; what the configuration asks for, if this machine has none."""
    world_size: int
    """Processes, one per GPU."""

    @property
    def is_missing(self) -> bool:
        """Whether the machine lacks the device."""
        return self.device.startswith("cuda") and not self.machine.gpus

    def describe(self) -> str:
        """Return the machine in a few words."""
        if self.is_missing:
            return "a GPU that is not here"
        if self.device == "cpu":
            return self.machine.describe().partition(";")[0]
        row, gpu = self.machine.row, self.machine.gpus[0]
        known = f" ({row.name})" if row else " (no data sheet: peak rate and power unknown)"
        return f"{self.world_size}x {gpu.name}{known}"


def target_of(config: RunConfig, machine: str | None) -> Target:
    """Return the machine that `--machine` names, or this one.

    Raises: ConfigError.
    """
    if machine is not None:
        named = require_machine(config, machine)
        return Target(named, "cuda", len(named.gpus))
    here, parallel = probe(), config.parallel
    replicas = 1 if parallel.replicate == "auto" else parallel.replicate
    device = config.train.device
    if device == "auto":
        device, _ = pick_device(device, here)
    devices = config.train.devices or 1
    if devices == "all":
        devices = len(here.gpus) if device.startswith("cuda") else 1
    return Target(here, device, max(replicas * parallel.shard, devices))


def find_data(config: RunConfig, progress: Progress) -> tuple[AnyDataset | None, str | None]:
    """Return the dataset of a configuration if it is on this machine, or why it is not used.

    Raises: DataError when it is damaged or too short.
    """
    paths = list(config.data.mix or ([config.data.path] if config.data.path else []))
    if not paths:
        return None, "No dataset is set, so the time leaves out the evaluations."
    for path in paths:
        if is_url(path):
            return None, f"{path} is not downloaded, so the time leaves out the evaluations."
        if not (Path(path).expanduser() / MANIFEST).exists():
            return None, f"{path} is not a dataset yet, so the time leaves out the evaluations."
    return open_dataset(config, progress=progress), None
