"""What a run does after too many bad steps in a row: it writes a report and ends.

The updates of bad steps were skipped, so the weights are still those before the first of them.
"""

from __future__ import annotations

from pathlib import Path

from flatout.assembly.run import Run
from flatout.errors import Diverged, in_shell
from flatout.storage.json_io import parsing, read_json
from flatout.training.checkpoint import catalog
from flatout.training.metrics.log import LESS_STEEP, Log
from flatout.training.run_dir.layout import EVENTS
from flatout.training.run_dir.runlog import DIVERGENCE
from flatout.training.saving import wait_for_saves

MOST_SEQUENCES = 64
"""Sequences of a step that a report lists."""


def require_good_steps(run: Run, log: Log, *, flush: bool = False) -> None:
    """End the run when `train.max_bad_steps` steps in a row were bad.

    All ranks call it at the same points. On a GPU it knows the last step only with `flush`. The
    event `divergence` names the data of these steps.

    Raises: Diverged with the cause, and the checkpoint from which a new run can start.
    """
    if flush:
        log.write_pending()
    if log.bad_steps.in_a_row < run.guard.most:
        return
    log.write_pending()
    bad = [one for one in log.bad_steps.last if one.in_a_row <= run.guard.most]
    wait_for_saves(run, log)
    good = run.mesh.broadcast_object(last_good(run.folder) if run.mesh.is_main else None)
    if run.mesh.is_main:
        log.event(
            DIVERGENCE,
            step=bad[-1].step,
            reason=bad[-1].reason,
            bad_steps=[one.to_dict() for one in bad],
            data=run.loader.data_at(bad[-1].start)[:MOST_SEQUENCES],
            last_good_checkpoint=None if good is None else str(good),
        )
    last, count = bad[-1].step, bad[-1].in_a_row  # the first ones may be of an earlier process
    steps = f"{count} bad steps in a row, the last one step {last}"
    start = (
        ""
        if good is None
        else f" `--resume {in_shell(good)} --run-dir DIR` starts it before these steps."
    )
    raise Diverged(
        f"Training has diverged: {steps if count > 1 else f'step {last} was bad'}: "
        f"{bad[-1].reason}. {run.folder / EVENTS} names its data.",
        fix=f"{LESS_STEEP}{start}",
    )


def last_good(folder: Path) -> Path | None:
    """Return the newest complete checkpoint that was not saved between bad steps, if any."""
    for step in reversed(catalog.steps(folder)):
        path = catalog.checkpoint_path(folder, step)
        if catalog.verify(path):
            continue
        with parsing(path / catalog.STATE):
            if not read_json(path / catalog.STATE)["values"].get("guard", {}).get("streak"):
                return path
    return None
