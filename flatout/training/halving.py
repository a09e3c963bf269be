"""Half the micro-batch for the next attempt of a run that ran out of memory.

It applies where flatout chose the rows. The attempt ends, and the next one continues from the last
checkpoint: in the same process, or of several ranks in new ones, since the others wait inside a
collective for the one that failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flatout.assembly.run import Run
from flatout.errors import SmallerBatch
from flatout.progress import counted
from flatout.training.out_of_memory import fewer_rows, is_out_of_memory
from flatout.training.run_dir import layout


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
