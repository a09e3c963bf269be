"""What findings look at before the first step: the host, the environment, the GPU, the memory."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from flatout.hardware import GIB, CpuTimes, Machine, probe, usable_cores
from flatout.measure.steps.evidence import GpuFacts, HostFacts
from flatout.parallel.rendezvous import stated_variables
from flatout.training.metrics.device import GpuDriver

VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "PYTHONDEVMODE",
    "PYTHONMALLOC",
    "PYTHONTRACEMALLOC",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE",
    "TORCH_CUDNN_V8_API_ENABLED",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_LOGS",
)
"""Environment variables that help or hurt training."""
BUSY_S = 0.3
"""How long the load of other processes is measured."""


def host_facts(folder: Path, *, needed_bytes: int | None = None) -> HostFacts:
    """Return facts of the host; `folder` is on the disk of the checkpoints."""
    available = torch.cuda.is_available()
    return HostFacts(
        cores=probe().cores,
        machine_cores=psutil.cpu_count() or usable_cores(),
        threads=torch.get_num_threads(),
        other_busy_cores=other_busy_cores(),
        environment=stated_variables(VARIABLES),
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda,
        sees_gpu=available,
        disk_free_gib=_free_gib(folder),
        disk_needed_gib=None if needed_bytes is None else needed_bytes / GIB,
    )


def other_busy_cores(seconds: float = BUSY_S) -> float:
    """Return the cores that other processes keep busy, measured for `seconds`."""
    before = cpu_times_with_children()
    time.sleep(seconds)
    return before.others_until(cpu_times_with_children())


def cpu_times_with_children() -> CpuTimes:
    """Return the CPU times, with running children, such as a loader's workers, as our own.

    Finding them reads the list of all processes, which takes milliseconds.
    """
    return CpuTimes.read(psutil.Process().children(recursive=True))


def gpu_facts(machine: Machine, device: str) -> GpuFacts | None:
    """Return what the driver reports of a GPU now; None without one, or when it reports nothing."""
    if not device.startswith("cuda") or not machine.gpus:
        return None
    properties = torch.cuda.get_device_properties(device)
    known: dict[str, Any] = {"name": properties.name, "supports_bf16": properties.major >= 8}
    driver = GpuDriver(torch.device(device))
    state, handle = driver.state(), driver.handle
    if state is None:
        return GpuFacts(**known)
    import pynvml

    if state.slowed_by is not None:
        known["slowed_by"] = ("its power cap",) * bool(state.is_at_power_cap) + state.slowed_by
    with suppress(pynvml.NVMLError):
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        others = [process for process in processes if process.pid != os.getpid()]
        known["other_processes"] = len(others)
        known["other_memory_gib"] = sum(one.usedGpuMemory or 0 for one in others) / GIB
    with suppress(pynvml.NVMLError, ZeroDivisionError):
        most_mhz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
        if state.clock_mhz is not None:
            known["clock_share"] = state.clock_mhz / most_mhz
    with suppress(pynvml.NVMLError, ZeroDivisionError):
        limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
        known["power_limit_share"] = limit / pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
    with suppress(pynvml.NVMLError):
        known["temperature_c"] = float(
            pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        )
    return GpuFacts(**known)


def _free_gib(folder: Path) -> float | None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free / GIB
    except OSError:
        return None
