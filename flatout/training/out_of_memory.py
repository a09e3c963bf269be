"""Torch's errors as ours: out of memory, no deterministic implementation, a lost process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from flatout.assembly.capacity import fewer_rows_advice
from flatout.assembly.memory import GIB, Workload, estimate
from flatout.assembly.resolve import memory_bytes, workload_of
from flatout.assembly.run import Run
from flatout.assembly.selection import assemble
from flatout.errors import OutOfMemory, RunFailed

ON_THE_CPU = "DefaultCPUAllocator"
"""Torch's CPU allocator, as its messages name it; it has no error type."""
NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""What torch writes after the name of an operation that has no deterministic form."""
PEER_LEFT = ("Connection closed by peer", "Connection reset by peer")
"""Gloo's messages when another process has exited."""
MAX_SHARE_LEFT = 0.95
"""A setting is suggested when it reduces the need to at most this share."""


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """Replace torch's errors with a RunFailed that has a fix.

    Covers running out of memory, operations that train.deterministic refuses, and processes that
    have exited.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory(run) from error
    except RuntimeError as error:
        if NOT_DETERMINISTIC in str(error):
            raise not_deterministic(run, str(error)) from error
        if any(words in str(error) for words in PEER_LEFT):
            raise RunFailed(
                "Another process of this run has ended.",
                fix="See its message for the cause, then run the same command again.",
            ) from error
        if ON_THE_CPU not in str(error):
            raise
        raise out_of_memory(run) from error


def not_deterministic(run: Run, message: str) -> RunFailed:
    """Return the error for an operation without a deterministic form, from torch's message."""
    operation = message.split(NOT_DETERMINISTIC)[0].splitlines()[-1].strip()
    return RunFailed(
        f"train.deterministic=true, and {operation} has no deterministic form "
        f"on {run.mesh.device.type}.",
        fix="Remove the speedup or the custom model code that calls it, "
        "or set train.deterministic=false.",
    )


def out_of_memory(run: Run) -> OutOfMemory:
    """Return the error for a run out of memory, with leaner model settings or fewer rows as fix."""
    workload = workload_of(run.config, assemble(run.decisions))
    need = estimate(workload, run.rows_per_device).total
    free = memory_bytes(run.machine, run.config.train.device, run.mesh.local_world_size)
    device = "GPU" if run.mesh.device.type == "cuda" else "machine"
    rows, accumulate = run.rows_per_device, run.config.batch.accumulate or 1
    advice = _leaner_keys(workload, rows) or fewer_rows_advice(workload, rows, accumulate, free)
    return OutOfMemory(
        f"Out of memory at step {run.step}: this run needs about {need / GIB:.1f} GiB "
        f"with {run.rows_per_device} rows per device, and the {device} has "
        f"{free / GIB:.1f} GiB free.",
        fix=advice
        or "Shorten data.seq_len, choose a smaller model, or shard it over several devices with "
        "parallel.shard.",
    )


def _leaner_keys(workload: Workload, rows: int) -> str:
    """Return advice to use the model's leanest settings; "" when they save little memory."""
    settings = workload.model_class.leanest(workload.model_config)
    if not settings:
        return ""
    leaner = replace(workload, model_config=workload.model_config.model_copy(update=dict(settings)))
    before, after = estimate(workload, rows).total, estimate(leaner, rows).total
    if after > MAX_SHARE_LEFT * before:
        return ""
    words = " ".join(f"model.{key}={value}" for key, value in settings.items())
    return f"Set {words}: it changes no result and saves about {(before - after) / GIB:.1f} GiB."
