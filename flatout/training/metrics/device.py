"""Memory, utilisation, power and clock of the training device."""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from flatout.hardware.machine import CpuTimes

GIB = 2**30
OWN_PAGES = Path("/proc/self/statm")
SLOWED_BY = {0x08: "a hardware fault", 0x20: "heat", 0x40: "heat", 0x80: "the power supply"}
"""Bits of NVML's clock event reasons. Its power cap is not one: GPUs train at it all the time."""
POWER_CAP = 0x04


class OtherProcesses:
    """Measures how many of the cores that this process may use others keep busy."""

    def __init__(self) -> None:
        self._before = CpuTimes.read()

    def figures(self, cores: int) -> dict[str, float]:
        """Return the metrics since the last ones. Empty within a second: the system counts ticks.

        `cores` is the number that this process may use.
        """
        if time.monotonic() - self._before.at_s < 1:
            return {}
        before, self._before = self._before, CpuTimes.read()
        return {"cpu/other_cores": before.others_until(self._before), "cpu/cores": cores}


def memory_gib(device: torch.device) -> dict[str, float]:
    """Return the device's memory metrics, and this process's. On a CPU, only those."""
    own_gib = process_gib()
    own = {} if own_gib is None else {"mem/process_gib": own_gib}
    if device.type == "cuda":
        return own | {
            "mem/allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "mem/peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "mem/reserved_gib": torch.cuda.memory_reserved(device) / GIB,
        }
    return own | {"mem/peak_gib": process_peak_bytes() / GIB}


def process_gib() -> float | None:
    """Return the memory of this process without mapped files. None where it is not known."""
    try:
        _, resident, shared, *_ = OWN_PAGES.read_text().split()
    except (OSError, ValueError):
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") / GIB


def process_peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    unit_bytes = 1 if sys.platform == "darwin" else 2**10  # macOS reports bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def gpu_figures(device: torch.device) -> dict[str, float]:
    """Return the GPU's utilisation and power if its driver reports them. Empty on a CPU."""
    if device.type != "cuda":
        return {}
    import pynvml

    found = {}
    for name, measure, unit in (
        ("gpu/util_pct", torch.cuda.utilization, 1.0),
        ("gpu/power_w", torch.cuda.power_draw, 1e-3),
    ):
        try:
            found[name] = measure(device) * unit
        except (pynvml.NVMLError, RuntimeError):
            continue  # virtual and partitioned GPUs do not report it. Records omit it
    return found


class GpuState(NamedTuple):
    """What the driver reports of the GPU now. None if not reported."""

    slowed_by: tuple[str, ...] | None
    """Heat and other faults that slow it down. Its power cap is not one."""
    is_at_power_cap: bool | None
    clock_mhz: float | None


class GpuDriver:
    """Asks the driver about one GPU. Nothing that it does waits for the GPU's work."""

    def __init__(self, device: torch.device) -> None:
        self.handle: object = None
        """NVML's handle of the GPU. None on a CPU and without a driver."""
        if device.type != "cuda":
            return
        import pynvml

        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def state(self) -> GpuState | None:
        """Return what slows the GPU down, and its clock.

        None on a CPU and without a driver.
        """
        if self.handle is None:
            return None
        import pynvml

        bits: int | None = None
        clock_mhz: float | None = None
        with suppress(pynvml.NVMLError, AttributeError):
            bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle)
        with suppress(pynvml.NVMLError):
            clock_mhz = float(pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM))
        is_capped = None if bits is None else bool(bits & POWER_CAP)
        return GpuState(slowed_by(bits), is_capped, clock_mhz)


def slowed_by(bits: int | None) -> tuple[str, ...] | None:
    """Return what slows a GPU down by NVML's bits, each once. None when they are not known."""
    if bits is None:
        return None
    return tuple(dict.fromkeys(name for bit, name in SLOWED_BY.items() if bits & bit))
