"""Memory, utilisation and power of the training device."""

from __future__ import annotations

import resource
import sys

import torch

GIB = 2**30


def memory_gib(device: torch.device) -> dict[str, float]:
    """Return the device's memory figures; on a CPU, the peak of this process."""
    if device.type == "cuda":
        return {
            "mem/allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "mem/peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "mem/reserved_gib": torch.cuda.memory_reserved(device) / GIB,
        }
    return {"mem/peak_gib": process_peak_bytes() / GIB}


def process_peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    unit_bytes = 1 if sys.platform == "darwin" else 2**10  # macOS reports bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def gpu_figures(device: torch.device) -> dict[str, float]:
    """Return the GPU's utilisation and power if its driver reports them; empty on a CPU."""
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
            continue  # virtual and partitioned GPUs do not report it; records omit it
    return found
