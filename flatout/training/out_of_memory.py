"""Torch's errors as ours: out of memory, no deterministic implementation, a lost process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from flatout.assembly.memory import (
    Workload,
    capacity_of,
    estimate,
    memory_bytes,
    recompute_blocks,
    rows_advice,
    smaller_batch,
)
from flatout.assembly.parts import USED_MEMORY, divisors
from flatout.assembly.prediction import MemoryEstimate
from flatout.assembly.resolve import workload_of
from flatout.assembly.run import Run
from flatout.errors import OutOfMemory, RunFailed
from flatout.progress import counted, readable_memory

OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Words of torch's errors without a type of their own: of the CPU's allocator, and of libraries."""
ONEDNN_OUT_OF_MEMORY = (
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory object",
)
"""All that oneDNN says when memory for its code or its buffers runs out.

"could not create a primitive descriptor for ...", of an unsupported operation, is another error.
"""
NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""What torch writes after the name of an operation that has no deterministic form."""
PEER_LEFT = ("Connection closed by peer", "Connection reset by peer")
"""Gloo's messages when another process has exited."""
MAX_SHARE_LEFT = 0.95
"""A setting is suggested when it reduces the need to at most this share."""
OTHERWISE = (
    "Shorten data.seq_len, choose a smaller model, or shard it over several devices with "
    "parallel.shard."
)


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """Replace torch's errors with a RunFailed that has a fix.

    Covers running out of memory, operations that train.deterministic refuses, and processes that
    have exited.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(run) from error
        if NOT_DETERMINISTIC in str(error):
            raise not_deterministic(run, str(error)) from error
        if any(words in str(error) for words in PEER_LEFT):
            raise RunFailed(
                "Another process of this run has ended.",
                fix="See its message for the cause, then run the same command again.",
            ) from error
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of torch or Python means that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        text.partition("\n")[0] in ONEDNN_OUT_OF_MEMORY
        or any(words in text for words in OUT_OF_MEMORY)
    )


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
    """Return the error for a run out of memory: what needs how much, and what needs less."""
    workload = workload_of(run.config)
    rows, accumulate = run.rows_per_device, run.config.batch.accumulate or 1
    free = available_bytes(run)
    device = "GPU" if run.mesh.device.type == "cuda" else "machine"
    where = "in the optimizer's step " if run.is_updating else ""
    what = f"Out of memory {where}at step {run.step}: this run "
    try:
        need = estimate(workload, rows, accumulate)
    except Exception:  # a custom model may need values, and the error at hand matters more
        half = _smaller(rows, accumulate)
        return OutOfMemory(
            f"{what}has {counted(rows, 'row')} per device, and the {device} has "
            f"{readable_memory(free)} for it.",
            fix=f"Set {rows_advice(half)}" if half else OTHERWISE,
        )
    return OutOfMemory(
        f"{what}needs about {readable_memory(need.total)} with {counted(rows, 'row')} per device "
        f"({parts_of(need)}), and the {device} has {readable_memory(free)} for it.",
        fix=_fix(run, workload, need, free, recomputes="activations" in run.recipe.filled_by),
    )


def parts_of(need: MemoryEstimate) -> str:
    """Return the parts of an estimate, and the moment at which most of them exist."""
    sizes = {
        "weights": need.weights,
        "optimizer state": need.optimizer,
        "gradients": need.gradients,
        "activations": need.activations,
        "logits": need.logits,
    }
    listed = ", ".join(f"{name} {readable_memory(size)}" for name, size in sizes.items())
    return f"{listed}; most in {need.peak.name}"


def available_bytes(run: Run) -> int:
    """Return the memory that this process could have: what it has already, and what is free."""
    device = run.config.train.device
    capacity = capacity_of(run.machine, device, run.mesh.local_world_size)
    if capacity is None:
        return memory_bytes(run.machine, device, run.mesh.local_world_size)
    on_gpu = run.mesh.device.type == "cuda"
    return capacity.free + (torch.cuda.memory_reserved(run.mesh.device) if on_gpu else 0)


def _fix(run: Run, workload: Workload, need: MemoryEstimate, free: int, *, recomputes: bool) -> str:
    rows, accumulate = run.rows_per_device, run.config.batch.accumulate or 1
    if run.is_updating:  # a smaller micro-batch does not help there
        return (
            "Use an optimizer with less state (+adamw-8bit in speedups), shard it over several "
            "devices with parallel.shard, or choose a smaller model. The run continues from its "
            "last checkpoint."
        )
    if leaner := _leaner_keys(workload, rows):
        return leaner
    fixes = []
    fitting = int(USED_MEMORY * free)
    half = smaller_batch(workload, rows * accumulate, fitting, rows // 2)
    half = half or _smaller(rows, accumulate)
    if half is not None:
        fixes.append(f"Set {rows_advice(half)}")
    saved = 0 if recomputes else need.total - _recomputed(workload, rows, accumulate)
    if saved > (1 - MAX_SHARE_LEFT) * need.total:
        fixes.append(
            f"{'Or add' if fixes else 'Add'} activation checkpointing (+checkpointing in "
            f"speedups): about {readable_memory(saved)} less, for a third more compute."
        )
    return " ".join(fixes) or OTHERWISE


def _smaller(rows: int, accumulate: int) -> tuple[int, int] | None:
    """Return at most half the rows, and how often they accumulate; None for a single row."""
    half = fewer_rows(rows, accumulate)
    return (half, rows * accumulate // half) if half else None


def fewer_rows(rows: int, accumulate: int) -> int | None:
    """Return at most half the rows of a micro-batch, such that they divide the step; or None."""
    return next(divisors(rows * accumulate, rows // 2), None)


def _recomputed(workload: Workload, rows: int, accumulate: int) -> int:
    """Return the bytes of a step that recomputes the blocks' activations."""
    transforms = (*workload.transforms, recompute_blocks)
    return estimate(replace(workload, transforms=transforms), rows, accumulate).total


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
    saved = readable_memory(before - after)
    return f"Set {words}: it changes no result and saves about {saved}."
