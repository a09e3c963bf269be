"""What findings look at before the first step: the host, the environment, the GPU, the memory."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch

from flatout.distributed.launch import stated_variables
from flatout.hardware.machine import (
    GIB,
    CpuTimes,
    Machine,
    other_busy_cores,
    probe,
)
from flatout.training.metrics.device import GpuDriver

VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONDEVMODE",
    "PYTHONTRACEMALLOC",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE",
    "TORCH_CUDNN_V8_API_ENABLED",
    "TORCH_DISTRIBUTED_DEBUG",
)
"""Environment variables that rules look at."""
BACKENDS = ("mkldnn", "cudnn")
"""Libraries of convolutions and products that a script can turn off."""
_IO, _PRESSURE = Path("/proc/self/io"), Path("/proc/pressure/io")


SHARED = Path("/dev/shm")
"""Where processes of Linux share memory."""


def host_facts(folder: Path) -> dict[str, Any]:
    """Return facts of the host, by their names in `Evidence`. Checkpoints go to `folder`."""
    return {
        "cores": probe().cores,
        "threads": torch.get_num_threads(),
        "other_busy_cores": other_busy_cores(),
        "environment": stated_variables(VARIABLES),
        "torch_version": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "sees_gpu": torch.cuda.is_available(),
        "backends_off": tuple(n for n in BACKENDS if not getattr(torch.backends, n).enabled),
        "shared_gib": _free_gib(SHARED) if SHARED.exists() else None,
        "disk_free_gib": _free_gib(folder),
    }


@dataclass(frozen=True)
class Usage:
    """Totals of this process and its children up to a moment. None where Linux counts nothing."""

    cpu: CpuTimes
    read_bytes: float | None
    """Bytes that came from a disk and not from memory."""
    stalled_s: float | None
    """Seconds at which some process of the machine waited for a disk."""

    @staticmethod
    def between(spans: Sequence[tuple[Usage, Usage]], steps: int) -> dict[str, float | None]:
        """Return what an average step has read and waited for, and the cores that others and the
        run kept busy, by their names in `Evidence`.
        """
        found: dict[str, float | None] = {}
        for name, field in (("read_bytes_per_step", "read_bytes"), ("disk_stalled_s", "stalled_s")):
            known = [(getattr(before, field), getattr(after, field)) for before, after in spans]
            known = [pair for pair in known if None not in pair]
            found[name] = sum(end - start for start, end in known) / steps if known else None
        seconds = [after.cpu.at_s - before.cpu.at_s for before, after in spans]
        if not any(seconds):
            return found | dict.fromkeys(("other_busy_cores", "own_cores", "worker_cores"))
        others = [before.cpu.others_until(after.cpu) for before, after in spans]
        found["other_busy_cores"] = fmean(others, seconds)
        for name, field in (("own_cores", "own_s"), ("worker_cores", "children_s")):
            used = (getattr(end.cpu, field) - getattr(start.cpu, field) for start, end in spans)
            found[name] = max(sum(used), 0.0) / sum(seconds)
        return found


def usage_now() -> Usage:
    """Return the use of the machine, with running children, such as a loader's workers, as ours.

    Finding them reads the list of all processes, which takes milliseconds.
    """

    def read(path: Path, pattern: str) -> int | None:
        with suppress(OSError):  # other systems, and containers that hide it
            if found := re.search(pattern, path.read_text(encoding="ascii"), re.MULTILINE):
                return int(found[1])
        return None

    stalled_us = read(_PRESSURE, r"^some .*total=(\d+)$")
    return Usage(
        CpuTimes.read(psutil.Process().children(recursive=True)),
        read(_IO, r"^read_bytes: (\d+)$"),
        None if stalled_us is None else 1e-6 * stalled_us,
    )


def used_mib(pids: Iterable[int]) -> list[float]:
    """Return the memory in use on the GPU, in this process, what this process has asked for (0
    where the system does not tell), and what some others use alone.

    Those share pages with this one, and each gets a copy of a page to which it writes.
    """
    own = psutil.Process().memory_info()
    used = [torch.cuda.memory_allocated(), own.rss, getattr(own, "data", 0), 0]
    with suppress(psutil.Error):  # they have ended
        used[3] = sum(psutil.Process(pid).memory_full_info().uss for pid in pids)
    return [one / 2**20 for one in used]


def gpu_facts(machine: Machine, device: str) -> dict[str, Any]:
    """Return what the driver reports of a GPU now, by its names in `Evidence`. {} without one."""
    if not device.startswith("cuda") or not machine.gpus:
        return {}
    properties = torch.cuda.get_device_properties(device)
    known: dict[str, Any] = {"supports_bf16": properties.major >= 8}
    driver = GpuDriver(torch.device(device))
    state, handle = driver.state(), driver.handle
    if state is None:
        return known
    import pynvml

    if state.slowed_by is not None:
        known["slowed_by"] = ("its power cap",) * bool(state.is_at_power_cap) + state.slowed_by
    with suppress(pynvml.NVMLError):
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        others = [process for process in processes if process.pid != os.getpid()]
        if others and len(others) == len(processes):
            # in a container, the driver has other numbers: this process is one of these
            own_bytes = torch.cuda.memory_reserved(device)
            others.remove(min(others, key=lambda p: abs((p.usedGpuMemory or 0) - own_bytes)))
        known["gpu_others"] = len(others)
        known["gpu_others_gib"] = sum(one.usedGpuMemory or 0 for one in others) / GIB
    with suppress(pynvml.NVMLError, ZeroDivisionError):
        most_mhz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
        if state.clock_mhz is not None:
            known["clock_share"] = state.clock_mhz / most_mhz
    with suppress(pynvml.NVMLError, ZeroDivisionError):
        limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
        known["power_limit_share"] = limit / pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
    return known


def _free_gib(folder: Path) -> float | None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free / GIB
    except OSError:
        return None
