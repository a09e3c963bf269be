"""What `diagnose` looks at when no run is named: this machine, with measured rates."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch

from flatout.hardware.machine import GIB, as_torch_sees, pick_device, probe
from flatout.hardware.roofline import copy_rate, measure
from flatout.measure.evidence import Evidence
from flatout.measure.host import VARIABLES, gpu_facts, host_facts
from flatout.progress import SILENT, Progress, counted


def machine_evidence(*, progress: Progress = SILENT) -> Evidence:
    """Return what can be known of this machine without a run. It needs no network.

    The rates of a matmul and of a copy are measured, which takes some seconds.
    """
    machine, host = probe(), host_facts(Path())
    device, reason = pick_device("auto", machine)
    machine = as_torch_sees(machine, device)
    on_gpu, gpu = device != "cpu", gpu_facts(machine, device)
    dtypes = ["fp32", *(["tf32"] if on_gpu else []), "bf16"]
    if on_gpu and torch.cuda.get_device_capability()[0] < 8:
        dtypes = ["fp32", "fp16"]
    with progress.task("Measuring matmuls and copies"):
        rates = [f"{measure(device, dtype)[0]:,.3g} TFLOP/s in {dtype}" for dtype in dtypes]
        copied = f"{copy_rate(device):,.0f} GB/s"
    free, total = psutil.virtual_memory().available, machine.memory_gib * GIB
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
    names = [f"{one.name}, {one.memory_gib:.0f} GiB, driver {one.driver}" for one in machine.gpus]
    stated = ", ".join(f"{name}={value}" for name, value in host["environment"].items())
    lines = {
        "GPU": "; ".join(names) if on_gpu else f"none that torch can use: {reason}",
        "torch": f"{torch.__version__}, Python {platform.python_version()}, {platform.system()}",
        "CPU": f"{machine.cpu_name}, {counted(machine.cores, 'core')}, "
        f"{counted(host['threads'], 'thread')}",
        "Matmuls": f"{', '.join(rates)}, measured",
        "Copies": f"{copied}, measured",
        "Memory": f"{machine.memory_gib:.0f} GiB, and {free / GIB:.0f} GiB of the "
        f"{'GPU' if on_gpu else 'machine'} are free",
        "Disk": f"{host['disk_free_gib'] or 0.0:,.0f} GiB free here",
        "Environment": stated or f"none of {len(VARIABLES)} variables that matter is set",
    }
    return Evidence(
        source="preflight",
        machine=machine,
        device=device,
        **host,
        **gpu,
        no_gpu_because=reason,
        total_gib=total / GIB,
        free_gib=free / GIB,
        machine_lines=tuple(lines.items()),
    )
