"""Repeat work that ran out of memory with half the micro-batch, where flatout chose its rows.

A single process repeats it at once. One of several records the smaller micro-batch and ends: the
others wait for it inside a collective, and the launcher starts all of them again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn, TypeVar

import torch

from flatout.assembly.build import make_feed
from flatout.assembly.run import Run
from flatout.assembly.selection import assemble
from flatout.config.schema import RunConfig
from flatout.errors import SmallerBatch
from flatout.progress import counted
from flatout.training.evaluation import batch_shapes
from flatout.training.metrics.log import Log
from flatout.training.out_of_memory import fewer_rows, is_out_of_memory
from flatout.training.run_dir import layout
from flatout.training.warmup import compiled_speedups, warm_up

Result = TypeVar("Result")


def that_fits(run: Run, log: Log, work: Callable[[], Result]) -> Result:
    """Return `work()`; while it runs out of memory, halve the micro-batch and call it again.

    `work` must leave the run unchanged when it fails. A step keeps its tokens: more micro-batches
    accumulate.
    Raises: the error of `work` when the rows are the user's, a single one is left, or weights may
            be half updated; SmallerBatch when there are other ranks.
    """
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            rows = _rows_after(run, error)
            if rows is None:
                raise
            if not run.repeats_with_fewer_rows:
                _end_for_fewer_rows(run, rows, error)
        # Only now has Python released the tensors of the frames in the error's traceback.
        _use_rows(run, log, rows)
        if compiled_speedups(run):
            torch.compiler.reset()
            that_fits(run, log, partial(warm_up, run, log, eval_shapes=batch_shapes(run)))


@contextmanager
def closing_feed(run: Run) -> Iterator[None]:
    """On exit, close the feed that the run then has."""
    try:
        yield
    finally:
        run.feed.close()


def _rows_after(run: Run, error: Exception) -> int | None:
    """Return the rows to try next; None when fewer cannot help."""
    if not run.rows_are_auto or run.is_updating or not is_out_of_memory(error):
        return None
    return fewer_rows(run.rows_per_device, run.config.batch.accumulate or 1)


def _with_rows(config: RunConfig, run: Run, rows: int) -> RunConfig:
    """Return a configuration whose step keeps its tokens in micro-batches of these rows."""
    per_step = run.rows_per_device * (run.config.batch.accumulate or 1)
    return config.with_values({"batch.rows_per_device": rows, "batch.accumulate": per_step // rows})


def _end_for_fewer_rows(run: Run, rows: int, error: Exception) -> NoReturn:
    """Record a smaller micro-batch for the next start of all ranks.

    Ranks that fail at the same step record the same.
    Raises: SmallerBatch; `error` when the disk returns one, since nothing would be smaller then.
    """
    before, stored = run.rows_per_device, layout.read_config(run.folder)
    if stored is None:
        raise error
    with_rows = counted(before, "row")
    text = f"Out of memory on rank {run.mesh.rank} after step {run.step:,} with {with_rows}"
    try:
        layout.write_config(run.folder, _with_rows(stored, run, rows))
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
        f"{text}. The run directory now has batch.rows_per_device={rows}, with the same tokens per "
        "step.",
        fix="All processes start again, from the last checkpoint: by themselves with "
        "train.devices, or torchrun with --max-restarts=9 and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
        "in its environment; otherwise run the same command again.",
    ) from error


def _use_rows(run: Run, log: Log, rows: int) -> None:
    """Rebuild the feed for smaller micro-batches, and record them for a resume."""
    before, position = run.rows_per_device, run.feed.position
    stored = layout.read_config(run.folder)
    if stored is not None:
        stored = _with_rows(stored, run, rows)
    run.feed.close()
    run.config = _with_rows(run.config, run, rows)
    recipe = assemble(run.decisions)
    run.feed = make_feed(run.config, recipe, run.mesh, run.dataset, run.reader, run.left_out)
    run.feed.seek(position)
    gc.collect()
    if run.mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    if stored is not None:
        with suppress(OSError):  # without it, a resume halves again
            layout.write_config(run.folder, stored)
    text = (
        f"Out of memory after step {run.step:,} with {before} rows per device: continuing with "
        f"{counted(rows, 'row')}, and the same tokens per step."
    )
    log.event("smaller_batch", text=text, rows_before=before, rows_per_device=rows)
    log.progress.say(text)
