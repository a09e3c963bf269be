"""Show the runs there are, with state, step, loss, size and age."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict

from flatout.commands import Command, Result
from flatout.errors import CheckpointError, FlatoutError
from flatout.recognised import require_local
from flatout.terminal import amount, duration
from flatout.training import catalog, folder
from flatout.training.files import folder_bytes, read_lines

DEFAULT_ROOT = Path("runs")
TAIL_BYTES = 256 * 1024
"""How much of metrics.jsonl is read, from its end: the last losses stand there."""


class RunItem(BaseModel):
    """One run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    run: str
    """The run folder."""
    state: str
    """running; finished; stopped (saved, the same command goes on); interrupted; failed; killed (no word of its end); new; damaged."""
    step: int
    """Optimiser steps taken, as far as it is written."""
    last_step: int | None
    """Optimiser steps of the whole run."""
    train_loss: float | None
    """Last training loss written, in nats a token."""
    val_loss: float | None
    """Last validation loss written, in nats a token."""
    checkpoints: list[int]
    """Steps that have a checkpoint."""
    bytes: int
    """Size of the run folder and its checkpoints."""
    age_s: float
    """Seconds since something was last written."""


class RunsResult(Result):
    """The runs there are, oldest first."""

    items: list[RunItem]
    """One object a run."""

    def summary(self) -> str:
        """Return a table, a line a run."""
        if not self.items:
            return "There are no runs yet. `flatout demo` makes one."
        rows = [("run", "state", "step", "train loss", "val loss", "size", "age"), *(_row(item) for item in self.items)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ("  ".join(_padded(row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def runs(root: Annotated[Path | str, typer.Argument(help="Folder that holds run folders, or one of them.")] = DEFAULT_ROOT) -> RunsResult:
    """Show the runs there are, with state, step, loss, size and age.

    Raises: CheckpointError when `root` is given and does not exist.
    """
    require_local(root)
    root = Path(root)
    if not root.is_dir() and root != DEFAULT_ROOT:
        raise CheckpointError(f"There is no folder {root}.", fix="Name a folder of runs; without one, `flatout runs` shows those in ./runs.")
    return RunsResult(items=[_item(path) for path in folder.list_runs(root)])


def _item(path: Path) -> RunItem:
    try:
        config = folder.read_config(path)
        checkpoints, state = catalog.steps(path), _state(path)
        size = folder_bytes(path)
        place = catalog.checkpoints_folder(path)
        size += 0 if place.is_relative_to(path) else folder_bytes(place)
    except FlatoutError:
        config, checkpoints, state, size = None, [], "damaged", folder_bytes(path)
    step = max(checkpoints, default=0)
    losses: dict[str, float] = {}
    for record in read_lines(path / "metrics.jsonl", tail_bytes=TAIL_BYTES):
        numbers = {name: value for name, value in record.items() if isinstance(value, (int, float)) and math.isfinite(value)}
        step = int(numbers.get("step", step))
        losses |= {name: numbers[name] for name in ("train/loss", "val/loss") if name in numbers}
    return RunItem(
        run=str(path),
        state=state,
        step=step,
        last_step=config.train.steps if config else None,
        train_loss=losses.get("train/loss"),
        val_loss=losses.get("val/loss"),
        checkpoints=checkpoints,
        bytes=size,
        age_s=round(max(time.time() - _last_written(path), 0.0), 1),
    )


def _state(path: Path) -> str:
    if folder.is_locked(path):
        return "running"
    code = folder.read_exit_code(path)
    if code is None:
        if folder.read_summary(path) is not None:
            return "finished"
        return "killed" if (path / folder.EVENTS).exists() else "new"
    return {0: "finished", 75: "stopped", 130: "interrupted", 143: "interrupted"}.get(code, "failed")


def _last_written(path: Path) -> float:
    files = (path / name for name in ("metrics.jsonl", folder.EVENTS, folder.SUMMARY, folder.EXIT_CODE, folder.CONFIG))
    return max(file.stat().st_mtime for file in files if file.exists())


def _row(item: RunItem) -> tuple[str, ...]:
    step = f"{item.step:,}" + (f" of {item.last_step:,}" if item.last_step else "")
    losses = ("-" if loss is None else f"{loss:.4f}" for loss in (item.train_loss, item.val_loss))
    return (item.run, item.state, step, *losses, amount(item.bytes, "bytes"), duration(item.age_s))


def _padded(row: tuple[str, ...], widths: list[int]) -> list[str]:
    """Text to the left, numbers to the right."""
    return [cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))]


COMMAND = Command(runs, example="flatout runs")
