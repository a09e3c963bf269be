"""What `bench` has measured on each GPU of this machine: one small file a GPU in flatout's cache.

`list speedups` shows it, and the first run on a GPU without one says how to get it. It changes none
of auto's decisions yet: those are the table's, `speedups/auto.yaml`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from flatout.files import write_text
from flatout.hardware import Machine

FORMAT_VERSION = 1
MINUTES = 30
"""What `bench` is told to take on a GPU: a ladder there has about 40 trials, assumed to take 20 s
each, start and compiling included; two rounds.
"""


class Gain(BaseModel):
    """What a speedup gained in the last ladder that measured it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    gain: float
    """How many times faster it makes training."""
    low: float | None
    """Lower end of its 94% interval; null: too few repeats to say."""
    high: float | None
    """Upper end."""
    where: str
    """What it was added to or left out of."""
    recipe: str
    """Whose ladder it was."""
    date: str
    """When that began."""
    commit: str | None
    """Of flatout; null where it does not run from a checkout."""
    torch: str
    """Its version."""

    def describe(self) -> str:
        """Return one line for a person."""
        spread = (
            "too few repeats to be sure"
            if self.low is None or self.high is None
            else f"{self.low:.2f} to {self.high:.2f}"
        )
        at = f", commit {self.commit}" if self.commit else ""
        return f"x{self.gain:.2f} ({spread}), {self.where} of {self.recipe}, {self.date[:10]}{at}"


class MeasuredGpu(BaseModel):
    """One GPU's file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    gpu: str
    """What its driver calls it."""
    speedups: dict[str, Gain] = {}
    """By name; empty where nothing has been measured, and somebody has been told so."""


def gpu_name(machine: Machine, device: str) -> str | None:
    """Return what the driver calls the GPU of a run on `device`; None for a CPU, and for a GPU that
    is not here.
    """
    kind, _, index = device.partition(":")
    number = int(index or 0)
    return machine.gpus[number].name if kind == "cuda" and number < len(machine.gpus) else None


def read(gpu: str, cache: Path) -> MeasuredGpu | None:
    """Return what has been measured on a GPU of that name; None where there is no file, or none
    that this version reads.
    """
    try:
        found = MeasuredGpu.model_validate(
            json.loads(_path(gpu, cache).read_text(encoding="utf-8"))
        )
    except (OSError, ValueError, ValidationError):
        return None
    return found if found.gpu == gpu and found.format_version == FORMAT_VERSION else None


def keep(gpu: str, gains: Mapping[str, Gain], cache: Path) -> Path:
    """Add gains to what has been measured on a GPU, each in place of the speedup's earlier one;
    return the file.

    Raises: OSError when the cache cannot be written.
    """
    path, before = _path(gpu, cache), read(gpu, cache)
    found = MeasuredGpu(gpu=gpu, speedups={**(before.speedups if before else {}), **gains})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found.model_dump(mode="json"), indent=1) + "\n")
    return path


def advice(gpu: str, recipe: str, cache: Path) -> str | None:
    """Return the line for the first run on a GPU on which no speedup has been measured; None where
    one was, or the line was returned before.
    """
    if read(gpu, cache) is not None:
        return None
    with suppress(OSError):  # it is said again the next time
        keep(gpu, {}, cache)
    return (
        f"No speedup has been measured on this GPU ({gpu}); `flatout bench {recipe} --minutes {MINUTES}`, with this run's settings, "
        f"measures them and takes about {MINUTES} minutes."
    )


def _path(gpu: str, cache: Path) -> Path:
    return (
        cache.expanduser()
        / "measured"
        / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    )
