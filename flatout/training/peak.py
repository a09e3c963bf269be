"""The peak rate of a resumed run: the one that it measured when it started."""

from __future__ import annotations

from pathlib import Path

import torch

from flatout.hardware.machine import Machine
from flatout.hardware.roofline import MEASURED, Peak
from flatout.training.run_dir import layout


def measured_peak(folder: Path, machine: Machine, device: str, dtype: str) -> Peak | None:
    """Return the peak rate that a run measured at its last start. None where it may differ now.

    Measuring takes a fifth of a second. The end of a run compares with a second measurement.
    """
    starts = [one for one in layout.read_events(folder) if one["event"] in ("start", "resume")]
    last = starts[-1] if starts else {}
    found = last.get("environment")
    environment = found if isinstance(found, dict) else {}
    here = [machine.describe(), device, torch.get_num_threads(), str(torch.__version__)]
    there = [last.get("machine"), last.get("device")]
    there += [environment.get("threads"), environment.get("torch")]
    tflops, source = last.get("peak_tflops"), str(last.get("peak_source"))
    is_same = source.startswith(MEASURED) and source.endswith(f", {dtype}") and here == there
    return Peak(tflops, source) if is_same and isinstance(tflops, float) and tflops > 0 else None
