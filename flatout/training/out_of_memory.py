"""What to say when the memory does not suffice, or an operation is refused: what the run needs,
what is there, and which setting fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from flatout.assembly.memory import Workload, estimate, rows_that_fit
from flatout.assembly.resolve import memory_bytes, workload_of
from flatout.assembly.run import Run
from flatout.assembly.selection import assemble
from flatout.errors import HardwareError, RunFailed

GIB = 2**30
ON_THE_CPU = "DefaultCPUAllocator"
"""Torch's allocator for a CPU, by which its messages name itself: it raises no error type of its
own.
"""
NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""What torch says of an operation that use_deterministic_algorithms refuses; its name stands
before.
"""
PEER_LEFT = ("Connection closed by peer", "Connection reset by peer")
"""What Gloo says when another process is gone."""
WORTH_SAYING = 0.95
"""A setting is advised that leaves at most this share of the need."""


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """Turn running out of memory, an operation that train.deterministic refuses, and the end of
    another process into an error with its fix.

    Raises: RunFailed.
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
                fix="Its own message says why; then run the same command again.",
            ) from error
        if ON_THE_CPU not in str(error):
            raise
        raise out_of_memory(run) from error


def not_deterministic(run: Run, said: str) -> RunFailed:
    """Return the error for an operation without a deterministic form, from what torch said of it."""
    operation = said.split(NOT_DETERMINISTIC)[0].splitlines()[-1].strip()
    return RunFailed(
        f"train.deterministic=true, and {operation} has no deterministic form on {run.mesh.device.type}.",
        fix="Leave out the speedup or the part of your own model that calls it, or set train.deterministic=false.",
    )


def out_of_memory(run: Run) -> RunFailed:
    """Return the error for a run that has just run out of memory, with what to set: the model's
    leaner keys, or fewer rows.
    """
    workload = workload_of(run.config, assemble(run.decisions))
    need = estimate(workload, run.rows_per_device).total
    there = memory_bytes(run.machine, run.config.train.device, run.mesh.local_world_size)
    device = "GPU" if run.mesh.device.type == "cuda" else "machine"
    advice = _leaner_keys(workload, run.rows_per_device) or _fewer_rows(
        workload, run.rows_per_device, there
    )
    return RunFailed(
        f"Out of memory at step {run.step}: this run needs about {need / GIB:.1f} GiB with {run.rows_per_device} rows on each device, "
        f"and the {device} has {there / GIB:.1f} GiB free.",
        fix=advice
        or "Shorten data.seq_len, choose a smaller model, or split it over several devices with parallel.shard.",
    )


def _leaner_keys(workload: Workload, rows: int) -> str:
    """The advice to take the model's leanest settings, which change no result; none where they save
    little.
    """
    settings = workload.model_class.leanest(workload.model_config)
    if not settings:
        return ""
    leaner = replace(workload, model_config=workload.model_config.model_copy(update=dict(settings)))
    before, after = estimate(workload, rows).total, estimate(leaner, rows).total
    if after > WORTH_SAYING * before:
        return ""
    words = " ".join(f"model.{key}={value}" for key, value in settings.items())
    return (
        f"Set {words}: it changes no result, and takes about {(before - after) / GIB:.1f} GiB less."
    )


def _fewer_rows(workload: Workload, rows: int, there: int) -> str:
    """The advice to take the largest micro-batch that should fit; none where not even one row does."""
    try:
        fitting = min(rows_that_fit(workload, int(0.8 * there)), rows - 1)
    except HardwareError:
        return ""
    return (
        f"Set batch.rows_per_device={fitting} and leave batch.accumulate out: the steps stay the same."
        if fitting
        else ""
    )
