"""Repeat work that ran out of memory with half the micro-batch, where flatout chose its rows.

A single process repeats it at once. One of several records the smaller micro-batch and ends: the
others wait for it inside a collective, and the launcher starts all of them again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import NoReturn, Self

import torch

from flatout.assembly.run import Run, make_loader
from flatout.config.schema import RunConfig
from flatout.errors import SmallerBatch
from flatout.progress import counted
from flatout.training.evaluation import batch_shapes
from flatout.training.out_of_memory import fewer_rows, is_out_of_memory
from flatout.training.run_dir import layout
from flatout.training.session import Session
from flatout.training.warmup import compiled_speedups, warm_up


class Attempt:
    """A context for work that may run out of memory, and leaves the run unchanged if it does.

    Such an error does not leave the context if fewer rows can help. `rows` is then their number.
    Raises: SmallerBatch in its place when there are other ranks.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.rows: int | None = None
        """Rows for the next attempt. None when this one did not run out of memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: object, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        run = self._run
        if not isinstance(error, (RuntimeError, MemoryError)):
            return False
        if not run.rows_are_auto or run.is_updating or not is_out_of_memory(error):
            return False
        self.rows = fewer_rows(run.rows_per_device, run.config.batch.accumulate or 1)
        if self.rows is not None and run.mesh.world_size > 1:
            _end_for_fewer_rows(run, self.rows, error)
        return self.rows is not None


def attempts(session: Session) -> Iterator[Attempt]:
    """Yield a context for work, and again, with half the micro-batch, while it lacks memory.

    A step keeps its tokens: more micro-batches accumulate. Use: `for attempt in attempts(session):
    with attempt: ...`. An error remains one when the rows are the user's, a single one is left, or
    weights may be half updated.
    """
    while True:
        attempt = Attempt(session.run)
        yield attempt
        if attempt.rows is None:
            return
        _use_rows(session, attempt.rows)
        if compiled_speedups(session.run):
            torch.compiler.reset()
            for again in attempts(session):
                with again:
                    warm_up(session.run, session.log, eval_shapes=batch_shapes(session.run))


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
        "in its environment. Otherwise run the same command again.",
    ) from error


def _use_rows(session: Session, rows: int) -> None:
    """Rebuild the data loader for smaller micro-batches, and record them for a resume."""
    run, log = session.run, session.log
    before, position = run.rows_per_device, run.loader.position
    stored = layout.read_config(run.folder)
    if stored is not None:
        stored = _with_rows(stored, run, rows)
    run.loader.close()
    run.config = _with_rows(run.config, run, rows)
    run.loader = make_loader(run)
    run.loader.seek(position)
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
