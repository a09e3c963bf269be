"""Torch's errors as ours: out of memory, no deterministic implementation, a lost process.

A run that is out of memory, and whose rows flatout chose, starts again with half the micro-batch
from its last checkpoint: in the same process, or of several ranks in new ones, since the others
wait inside a collective for the one that failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from flatout.assembly.memory import (
    USED_MEMORY,
    MemoryEstimate,
    estimate,
    free_bytes,
    workload_of,
)
from flatout.assembly.parts import divisors
from flatout.assembly.run import Run
from flatout.display import memory_size
from flatout.errors import ConfigError, OutOfMemory, RunFailed, SmallerBatch
from flatout.models.recompute import recompute_layers
from flatout.progress import counted
from flatout.training.run_dir import layout

OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Words of torch's errors without a separate type: of the CPU's allocator, and of libraries."""
ONEDNN_OUT_OF_MEMORY = (
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory object",
)
"""The whole message of oneDNN when memory for its code or its buffers runs out.

"could not create a primitive descriptor for ..." is different: an unsupported operation.
"""
NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""What torch writes after the name of an operation that has no deterministic form."""
PEER_LEFT = ("Connection closed by peer", "Connection reset by peer")
"""Gloo's messages when another process has exited."""
TIMED_OUT = "Timed out waiting"
"""Gloo's message when a collective takes longer than `rendezvous.STEP_TIMEOUT`."""
PARTS = ("weights", "optimizer", "gradients", "activations", "logits")
"""Parts of the memory that an error lists."""
SMALL_BYTES = 32
"""Twice the bytes of a weight with its gradient and AdamW's state."""
MAX_SHARE_LEFT = 0.95
"""A setting is suggested when it reduces the need to at most this share."""
OTHERWISE = (
    "Shorten data.seq_len, choose a smaller model, or shard it over several devices with "
    "parallel.shard."
)


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """Replace torch's errors with a RunFailed that has a fix.

    Covers running out of memory, and operations that train.deterministic rejects.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(run) from error
        if NOT_DETERMINISTIC in str(error):
            operation = str(error).split(NOT_DETERMINISTIC)[0].splitlines()[-1].strip()
            raise RunFailed(
                f"train.deterministic=true, but {operation} has no deterministic form "
                f"on {run.mesh.device.type}.",
                fix="Remove the speedup or the custom model code that calls it, "
                "or set train.deterministic=false.",
            ) from error
        raise


@contextmanager
def halving(run: Run, *, is_auto: bool) -> Iterator[None]:
    """Record a smaller micro-batch when the block runs out of memory, and raise SmallerBatch.

    An error remains one when the rows are the user's (not `is_auto`), when a single one is left, in
    the optimizer's step, where fewer rows do not help, and when the disk returns an error, as
    nothing would be smaller then. Ranks that fail at the same step record the same.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_auto or run.is_updating or not is_out_of_memory(error):
            raise
        before, number = run.rows_per_device, run.config.batch.accumulate or 1
        rows, stored = fewer_rows(before, number), layout.read_config(run.folder)
        if rows is None or stored is None:
            raise
        batch = {"batch.rows_per_device": rows, "batch.accumulate": before * number // rows}
        where = f" on rank {run.mesh.rank}" if run.mesh.world_size > 1 else ""
        text = f"Out of memory{where} after step {run.step:,} with {counted(before, 'row')}"
        try:
            layout.write_config(run.folder, stored.with_values(batch))
            layout.append_event(
                run.folder,
                "smaller_batch",
                step=run.step,
                text=f"{text}: starting again with {rows}, and the same tokens per step.",
                rows_before=before,
                rows_per_device=rows,
            )
        except OSError:
            raise error from None
        raise SmallerBatch(
            f"{text}. The run directory now has batch.rows_per_device={rows}, with the same tokens "
            "per step.",
            fix="All processes start again, from the last checkpoint: by themselves with "
            "train.devices, or torchrun with --max-restarts=9 and "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment. Otherwise run the same "
            "command again.",
        ) from error


@contextmanager
def peers_named() -> Iterator[None]:
    """Replace torch's errors about another process that exited or hangs with a RunFailed."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in PEER_LEFT):
            raise RunFailed(
                "Another process of this run has ended.",
                fix="See its message for the cause, then run the same command again.",
            ) from error
        if TIMED_OUT in str(error):
            raise RunFailed(
                "Another process of this run did not answer in time: it hangs, or is far slower.",
                fix="Look for its last message, and run the same command again. "
                "RUN/watchdog.txt shows where each process stands, if it was written.",
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


def out_of_memory(run: Run) -> OutOfMemory:
    """Return the error for a run out of memory: what needs how much, and what needs less."""
    need, free, rows = _need(run), _free_bytes(run), counted(run.rows_per_device, "row")
    where = "in the optimizer's step " if run.is_updating else ""
    needs = f"has {rows} per device"
    if need is not None:
        sizes = (f"{name} {memory_size(getattr(need, name))}" for name in PARTS)
        needs = f"needs about {memory_size(need.total)} with {rows} per device "
        needs += f"({', '.join(sizes)}; most in {need.peak.name})"
    has = "GPU" if run.mesh.device.type == "cuda" else "machine"
    return OutOfMemory(
        f"Out of memory {where}at step {run.step}: this run {needs}, and the {has} has "
        f"{memory_size(free)} for it.",
        fix=_fix(run, need, free),
    )


def shortage(run: Run, *, rows_are_auto: bool) -> list[str]:
    """Return a sentence if a run needs more memory than is free, by estimate.

    It takes half a second on a CPU, where it is left out for small models with rows of flatout's
    choice.
    """
    free, on_cpu = _free_bytes(run), run.mesh.device.type == "cpu"
    is_small = SMALL_BYTES * sum(p.numel() for p in run.trained()) < free
    need = None if on_cpu and rows_are_auto and is_small else _need(run)
    if need is None or need.total <= free:
        return []
    return [
        f"By estimate this run needs {memory_size(need.total)}, and {memory_size(free)} are free: "
        "it may run out of memory, or swap. `flatout plan` shows what needs less."
    ]


def _need(run: Run) -> MemoryEstimate | None:
    try:
        accumulate = run.config.batch.accumulate or 1
        return estimate(workload_of(run.config), run.rows_per_device, accumulate)
    except Exception:  # a custom model may not be traced, and a warning must not end its run
        return None


def _free_bytes(run: Run) -> int:
    """Return the memory of this process. What it has already counts as free."""
    free = free_bytes(run.machine, run.config.train.device, run.mesh.local_world_size) or 0
    if run.mesh.device.type == "cuda":
        free += torch.cuda.memory_reserved(run.mesh.device)
    return free


def _fix(run: Run, need: MemoryEstimate | None, free: int) -> str:
    if run.is_updating:  # a smaller micro-batch does not help there
        return (
            "Use an optimizer with less state (+adamw-8bit in speedups), shard it over several "
            "devices with parallel.shard, or choose a smaller model. The run continues from its "
            "last checkpoint."
        )
    rows, accumulate = run.rows_per_device, run.config.batch.accumulate or 1
    share, workload = rows * accumulate, workload_of(run.config)
    fewer = [*divisors(share, rows // 2)]
    if need is None:
        return f"Set {rows_advice(fewer[0], share)}" if fewer else OTHERWISE
    fixes, usable = [], int(USED_MEMORY * free)
    fits = (less for less in fewer if estimate(workload, less, share // less).total <= usable)
    if fewer:
        fixes.append(f"Set {rows_advice(next(fits, fewer[0]), share)}")
    if run.parts.activations is None:
        recomputing, less = replace(workload, activations=recompute_layers), 0
        with suppress(ConfigError):  # a module without a list of layers
            less = need.total - estimate(recomputing, rows, accumulate).total
        if less > (1 - MAX_SHARE_LEFT) * need.total:
            fixes.append(
                f"{'Or add' if fixes else 'Add'} activation checkpointing (+checkpointing in "
                f"speedups): about {memory_size(less)} less, for a third more compute."
            )
    return " ".join(fixes) or OTHERWISE


def rows_advice(rows: int, rows_per_rank: int) -> str:
    """Return the settings for micro-batches of `rows`, as the end of a sentence."""
    return (
        f"batch.rows_per_device={rows} batch.accumulate={rows_per_rank // rows}: "
        "the tokens per step stay the same."
    )


def fewer_rows(rows: int, accumulate: int) -> int | None:
    """Return at most half the rows of a micro-batch, such that they divide the step, or None."""
    return next(divisors(rows * accumulate, rows // 2), None)
