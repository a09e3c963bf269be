"""What to say when the memory does not suffice: what the run needs, what is there, and which setting fits."""

from __future__ import annotations

from flatout.errors import HardwareError, RunFailed
from flatout.memory import estimate, rows_that_fit
from flatout.run import Run, memory_bytes, workload_of
from flatout.selection import assemble

GIB = 2**30


def out_of_memory(run: Run) -> RunFailed:
    """Return the error for a run that has just run out of memory, with the largest micro-batch that should fit."""
    workload = workload_of(run.config, assemble(run.decisions))
    need = estimate(workload, run.rows_per_device).total
    there = memory_bytes(run.machine, run.config.train.device, run.mesh.local_world_size)
    device = "GPU" if run.mesh.device.type == "cuda" else "machine"
    try:
        fitting = min(rows_that_fit(workload, int(0.8 * there)), run.rows_per_device - 1)
    except HardwareError:
        fitting = 0
    advice = f"Set batch.rows_per_device={fitting} and leave batch.accumulate out: the steps stay the same." if fitting else ""
    return RunFailed(
        f"Out of memory at step {run.step}: this run needs about {need / GIB:.1f} GiB with {run.rows_per_device} rows on each device, "
        f"and the {device} has {there / GIB:.1f} GiB free.",
        fix=advice or "Shorten data.seq_len, choose a smaller model, or split it over several devices with parallel.shard.",
    )
