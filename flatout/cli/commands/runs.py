"""List runs: their state, step, loss, size, age and settings."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command
from flatout.config.signature import Argument, checked
from flatout.display import age, aligned, amount, optional
from flatout.errors import CheckpointError, FlatoutError, on_one_line
from flatout.measure.runlog import RunLog
from flatout.storage.files import Stored, folder_bytes
from flatout.storage.json_io import JsonObject, Result
from flatout.storage.recognised import require_local
from flatout.training.checkpoint import catalog, location
from flatout.training.run_dir import layout
from flatout.training.run_dir.lock import run_state

DEFAULT_ROOT = Path("runs")
TAIL_BYTES = 256 * 1024
"""How much of metrics.jsonl is read: its end has the last losses."""
WRITTEN = (layout.METRICS, layout.EVENTS, layout.SUMMARY)
"""Files whose times show when a run was last active. A command that is refused changes others."""


class RunItem(Stored):
    """One run."""

    run: str
    """The run directory."""
    state: str
    """running, finished, stopped (saved, the same command resumes it), interrupted, failed, killed
    (without an exit code), new or damaged."""
    step: int
    """Last recorded optimizer step."""
    last_step: int | None
    """Optimizer steps of the whole run."""
    train_loss: float | None
    """Last recorded training loss, in nats per token."""
    val_loss: float | None
    """Last recorded validation loss, in nats per token."""
    checkpoints: list[int]
    """Steps that have a checkpoint."""
    bytes: int
    """Size of the run directory and its checkpoints."""
    age_s: float
    """Seconds since its last record or event."""
    settings: JsonObject
    """The keys in which runs of its recipe differ, and the recipe's `name` if several are listed.

    Values are as the user gave them."""


class RunsResult(Result):
    """All runs, oldest first."""

    items: list[RunItem]
    """One object per run."""

    def summary(self) -> str:
        """Return a table with one line per run, each followed by the settings that differ."""
        if not self.items:
            return "There are no runs yet. `flatout demo` starts one."
        base = os.path.commonpath([os.path.dirname(item.run) for item in self.items])
        rows: list[tuple[str, ...]] = [("run", "state", "step", "loss", "val loss", "size", "age")]
        for item in self.items:
            step = f"{item.step:,}" + (f"/{item.last_step:,}" if item.last_step else "")
            losses = (optional(loss, ".4f") for loss in (item.train_loss, item.val_loss))
            name, size = os.path.relpath(item.run, base or None), amount(item.bytes, "bytes")
            rows.append((name, item.state, step, *losses, size, age(item.age_s)))
        head, *lines = aligned(rows, left=2)
        shown = [f"In {base or '.'}:", head]
        for line, item in zip(lines, self.items, strict=True):
            text = _settings_text(item)
            shown += [line, f"    {text}"] if text else [line]
        return "\n".join(shown)


@checked
def runs(
    root: Annotated[
        Path | str, Argument("Directory that contains run directories, or one of them.")
    ] = DEFAULT_ROOT,
) -> RunsResult:
    """List runs: their state, step, loss, size, age, and the settings in which they differ.

    Raises: CheckpointError when `root` is given and does not exist.
    """
    require_local(root)
    root = Path(root)
    if not root.is_dir() and root != DEFAULT_ROOT:
        raise CheckpointError(
            f"There is no directory {root}.",
            fix="Name a directory of runs. Without one, `flatout runs` lists those in ./runs.",
        )
    paths = layout.list_runs(root)
    settings = differing([_settings(path) for path in paths])
    return RunsResult(items=list(map(_item, paths, settings)))


def differing(configurations: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the keys of each configuration in which runs of the same recipe differ.

    The recipe's name is included if there are several recipes.
    """
    values: dict[tuple[str, str], set[str]] = {}
    for one in configurations:
        for key, value in one.items():
            values.setdefault((one["name"], key), set()).add(json.dumps(value, default=str))
    recipes = {one["name"] for one in configurations if one}
    return [
        {
            key: value
            for key, value in one.items()
            if value is not None
            and (len(recipes if key == "name" else values[one["name"], key]) > 1)
        }
        for one in configurations
    ]


def _settings(path: Path) -> JsonObject:
    try:
        settings = layout.read_settings(path)
        return settings | {"name": str(settings.get("name", path.name))}
    except FlatoutError:  # its state is shown as damaged
        return {}


def _settings_text(item: RunItem) -> str:
    """Return a run's settings as text, with its recipe if the directory's name does not show it."""
    shown = {
        key: value
        for key, value in item.settings.items()
        if key != "name" or not os.path.basename(item.run).startswith(str(value))
    }
    return ", ".join(
        f"{key}={on_one_line(value) if isinstance(value, str) else json.dumps(value, default=str)}"
        for key, value in shown.items()
    )


def _item(path: Path, settings: JsonObject) -> RunItem:
    try:
        config = layout.read_config(path)
        checkpoints, state = catalog.steps(path), run_state(path)
        size = folder_bytes(path)
        elsewhere = location.checkpoints_folder(path)
        size += 0 if elsewhere.is_relative_to(path) else folder_bytes(elsewhere)
        log = RunLog(path, tail_bytes=TAIL_BYTES)
        steps = (config and config.train.steps) or math.inf
        records = [record for record in log.records() if record["step"] <= steps]
        state = state if log.is_readable else "damaged"
    except FlatoutError:
        config, checkpoints, state, size, records = None, [], "damaged", folder_bytes(path), []
    last = {name: value for record in records for name, value in record.items()}
    written = [path / name for name in WRITTEN if (path / name).exists()]
    written = written or [path / layout.CONFIG]
    age_s = time.time() - max(file.stat().st_mtime for file in written)
    return RunItem(
        run=str(path),
        state=state,
        step=int(last.get("step", max(checkpoints, default=0))),
        last_step=config.train.steps if config else None,
        train_loss=last.get("train/loss"),
        val_loss=last.get("val/loss"),
        checkpoints=checkpoints,
        bytes=size,
        age_s=round(max(age_s, 0.0), 1),
        settings=settings,
    )


COMMAND = Command(runs, example="flatout runs")
