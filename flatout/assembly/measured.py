"""What `bench` has measured on this hardware: one small file per GPU or CPU in flatout's cache.

`auto` prefers these results to the defaults in the speedups' own files, and `list speedups` shows
them. The first run on a GPU without a file says how to get one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from pydantic import ConfigDict, Field

from flatout.files import write_text
from flatout.hardware import Machine
from flatout.json_io import Stored

FORMAT_VERSION = 1
MINUTES = 30
"""Suggested --minutes on a GPU: about 40 trials, assumed to take 20 s each with start and
compilation; two rounds.
"""


class Gain(Stored):
    """What a speedup gained in the last ladder that measured it."""

    gain: float
    """How many times faster training is with it."""
    low: float | None
    """Lower end of its 94% interval; null: too few repeats to tell."""
    high: float | None
    """Upper end."""
    where: str
    """What it was added to or left out of."""
    recipe: str
    """Recipe of that ladder."""
    date: str
    """When the ladder started."""
    commit: str | None
    """Commit of flatout; null outside a checkout."""
    torch: str
    """Version of torch."""

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low is not None and self.low > 1

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval lies below 1."""
        return self.high is not None and self.high < 1

    def describe(self) -> str:
        """Return one line for a person."""
        spread = (
            "too few repeats to be sure"
            if self.low is None or self.high is None
            else f"{self.low:.2f} to {self.high:.2f}"
        )
        at = f", commit {self.commit}" if self.commit else ""
        return f"x{self.gain:.2f} ({spread}), {self.where} of {self.recipe}, {self.date[:10]}{at}"


class MeasuredHere(Stored):
    """The file of one GPU or CPU."""

    model_config = ConfigDict(populate_by_name=True)

    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    hardware: str = Field(alias="gpu")
    """The GPU as its driver names it, or the CPU and its cores. The key on disk is `gpu`."""
    speedups: dict[str, Gain] = Field({})
    """By name; empty if nothing has been measured and the user has been told so."""


def gpu_name(machine: Machine, device: str) -> str | None:
    """Return the GPU of a run on `device` as its driver names it; None for a CPU or absent GPU."""
    kind, _, index = device.partition(":")
    number = int(index or 0)
    return machine.gpus[number].name if kind == "cuda" and number < len(machine.gpus) else None


def hardware_name(machine: Machine, device: str) -> str | None:
    """Return the GPU of a run on `device`, or the CPU with its cores; None for an absent GPU."""
    if device.startswith("cuda"):
        return gpu_name(machine, device)
    return f"{machine.cpu_name}, {machine.cores} cores" + (", MPS" if device == "mps" else "")


def read(hardware: str, cache: Path) -> MeasuredHere | None:
    """Return what was measured on this hardware; None without a file that this version reads."""
    try:
        found = MeasuredHere.model_validate_json(_path(hardware, cache).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.hardware == hardware and found.format_version == FORMAT_VERSION else None


def gains_here(machine: Machine, device: str, cache: Path | None) -> dict[str, Gain]:
    """Return the gains measured on the hardware of `device` with the torch in use, by speedup.

    Without a `cache` there are none.
    """
    hardware = hardware_name(machine, device)
    found = read(hardware, cache) if hardware and cache else None
    if found is None:
        return {}
    torch = _release(version("torch"))
    return {name: gain for name, gain in found.speedups.items() if _release(gain.torch) == torch}


def keep(hardware: str, gains: Mapping[str, Gain], cache: Path) -> Path:
    """Store gains in the file of this hardware, replacing earlier ones, and return its path.

    Raises: OSError when the cache cannot be written.
    """
    path, before = _path(hardware, cache), read(hardware, cache)
    found = MeasuredHere(
        hardware=hardware, speedups={**(before.speedups if before else {}), **gains}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found.model_dump(mode="json", by_alias=True), indent=1) + "\n")
    return path


def advice(gpu: str, recipe: str, cache: Path) -> str | None:
    """Return the hint for the first run on a GPU without measurements; None from the second on."""
    if read(gpu, cache) is not None:
        return None
    with suppress(OSError):  # the hint is then repeated at the next run
        keep(gpu, {}, cache)
    return (
        f"No speedup has been measured on this GPU ({gpu}); `flatout bench {recipe} --minutes "
        f"{MINUTES}`, with this run's settings, measures them in about {MINUTES} minutes."
    )


def _release(torch_version: str) -> str:
    """Return a version without its build: 2.13.0+cu130 and 2.13.0+cpu are the same release."""
    return torch_version.partition("+")[0]


def file_name(hardware: str) -> str:
    """Return the name of a file about some hardware."""
    return re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-") + ".json"


def _path(hardware: str, cache: Path) -> Path:
    return cache.expanduser() / "measured" / file_name(hardware)
