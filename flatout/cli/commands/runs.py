"""List runs, and the checkpoints of a run."""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command
from flatout.config.schema import flat
from flatout.config.signature import Argument, Option, checked
from flatout.display import Show, age, amount, loss
from flatout.errors import CheckpointError, ConfigError, FlatoutError, in_shell, on_one_line
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored, folder_bytes, writing_run
from flatout.storage.json_io import JsonObject, Result
from flatout.training.checkpoint import catalog, contents
from flatout.training.checkpoint.catalog import CheckpointInfo
from flatout.training.run_dir import layout
from flatout.training.run_dir.lock import hold_lock, is_locked
from flatout.training.run_dir.lookup import RUNS, find_run
from flatout.training.run_dir.runlog import RunLog

TAIL_BYTES = 256 * 1024
"""How much of metrics.jsonl is read: its end has the last losses."""
WRITTEN = (layout.METRICS, layout.EVENTS)
"""Files whose times show when a run was last active. A command that is refused changes others."""
Loss = Annotated[float | None, Show("loss", loss, unknown="-")]
ValidationLoss = Annotated[float | None, Show("val loss", loss, unknown="-")]
Bytes = Annotated[int, Show("size", lambda size: amount(size, "bytes"))]
Age = Annotated[float, Show("age", age)]


class RunItem(Stored):
    """One run."""

    run: Annotated[str, Show("run", lambda run: run.removeprefix(f"{RUNS}/"))]
    """The run directory."""
    state: Annotated[str, Show("state")]
    """running, finished, stopped (saved, the same command resumes it), interrupted, failed, killed
    (without an exit code), new or damaged."""
    step: Annotated[int, Show("step", record=lambda item: item.progress())]
    """Last recorded optimizer step."""
    last_step: int | None
    """Optimizer steps of the whole run."""
    train_loss: Loss
    """Last recorded training loss, in nats per token."""
    val_loss: ValidationLoss
    """Last recorded validation loss, in nats per token. Of a finished run, on the whole split."""
    checkpoints: list[int]
    """Steps that have a checkpoint."""
    bytes: Bytes
    """Size of the run directory and its checkpoints."""
    age_s: Age
    """Seconds since its last record or event."""
    problems: tuple[str, ...] = ()
    """What is damaged or missing in its files, one sentence each."""
    settings: Annotated[JsonObject, Show("settings", record=lambda item: item.differences())]
    """The keys in which runs of its recipe differ, and the recipe's `name` if several are listed.

    Values are as the user gave them."""

    def progress(self) -> str:
        """Return the step, and the last one if it is known."""
        return f"{self.step:,}" + (f"/{self.last_step:,}" if self.last_step else "")

    def differences(self) -> str:
        """Return the settings, with the recipe if the directory's name does not show it."""
        return ", ".join(
            f"{key}={on_one_line(one) if isinstance(one, str) else json.dumps(one, default=str)}"
            for key, one in self.settings.items()
            if key != "name" or not os.path.basename(self.run).startswith(str(one))
        )


class CheckpointItem(Stored):
    """One checkpoint."""

    path: str
    """Its directory."""
    step: Annotated[int, Show("step")]
    """Optimizer steps before it."""
    train_loss: Loss
    """Training loss at this step, in nats per token."""
    val_loss: ValidationLoss
    """Validation loss at this step, in nats per token."""
    files: int
    """Its files. 0 if its manifest cannot be read."""
    bytes: Bytes
    """Its size."""
    age_s: Age
    """Seconds since it was saved."""
    valid: Annotated[bool | None, Show(form={True: "valid", False: "not valid"}.get, unknown="")]
    """Whether all of its files are there and match its manifest. Null if only their sizes were
    compared, and match."""
    best: Annotated[bool | None, Show(form=lambda best: "best" * best, unknown="")] = None
    """Whether it has the lowest validation loss of the run. Null if that is not known."""
    problems: list[str]
    """Why it is not valid: one sentence per file."""
    info: CheckpointInfo | None
    """What it states about itself. Null if an earlier version wrote it, or it is not readable."""


class RunsResult(Result):
    """Runs, oldest first, or one run with its checkpoints."""

    items: Annotated[list[RunItem], Show(record=lambda _: "")]
    """One object per run."""
    checkpoints: Annotated[tuple[CheckpointItem, ...], Show(record=lambda _: "")] = ()
    """Of the run that was named, by step."""
    removed: tuple[str, ...] = ()
    """The directories that this command deleted."""

    @property
    def notes(self) -> list[str]:
        """What was deleted, and what is wrong with checkpoints."""
        if not self.items:
            return ["There are no runs yet. `flatout demo` starts one."]
        run = in_shell(self.items[0].run)
        notes = [f"Deleted {path}" for path in self.removed]
        notes += self.items[0].problems if self.checkpoints else ()
        notes += [item.problems[0] for item in self.checkpoints if item.problems]
        if self.checkpoints:
            notes.append(f"`flatout verify {run}` reads every file of the checkpoints.")
        return notes


@checked
def runs(
    run: Annotated[
        str | Path | None,
        Argument("A run, or a directory that contains runs (default: runs)."),
    ] = None,
    keep: Annotated[
        int | None,
        Option(
            "Delete the run's checkpoints but the newest N valid ones, the best one, and those "
            "that checkpoint.keep_every keeps.",
            min=1,
        ),
    ] = None,
    *,
    progress: Progress = SILENT,
) -> RunsResult:
    """List runs: their state, step, loss, size, age, and the settings in which they differ.

    Given a run, its checkpoints are listed too. Nothing is deleted without --keep, and never the
    last valid checkpoint. `flatout verify RUN` reads every file.

    Raises: CheckpointError when there is no such run, or it is running and something is to be
            deleted.
    """
    root = RUNS if run is None else Path(run)
    paths = layout.list_runs(root) if root.is_dir() else []
    if run is not None and not paths:
        root = find_run(run)
        paths = [root]
    removed = list[Path]()
    if keep is not None:
        if paths != [root]:
            raise ConfigError(
                "--keep deletes checkpoints of one run.",
                fix="Name it: `flatout runs RUN --keep 1`.",
            )
        removed = _prune(root, keep, progress)
        if not removed:
            progress.say("There was nothing to delete.")
    items = list(map(_item, paths, differing([_settings(path) for path in paths])))
    if paths != [root] or items[0].state == "damaged":
        return RunsResult(items=items)
    return RunsResult(
        items=items,
        checkpoints=tuple(checkpoint_items(root)),
        removed=tuple(map(str, removed)),
    )


def checkpoint_items(
    run: Path, *, read: bool = False, progress: Progress = SILENT
) -> list[CheckpointItem]:
    """Return the checkpoints of a run, by step, or the one that `run` is.

    With `read`, each of their files is read in full.

    Otherwise tensors are judged by the sizes of their files. Checkpoints that a process deletes
    meanwhile are omitted. The validation loss of the last step, which a run measures after its last
    save, is that of metrics.jsonl.
    """
    is_one, items = catalog.is_checkpoint(run), []
    for path in [run] if is_one else _paths(run):
        try:
            if read:
                problems = contents.problems_of(path, progress=progress)
            else:
                problems = catalog.verify(path, deep=False)
        except OSError as error:
            problems = [f"{error.filename or path} cannot be read: {error.strerror}."]
        info = catalog.read_info(path)
        item = CheckpointItem(
            path=str(path),
            step=catalog.step_of(path),
            train_loss=info and info.train_loss,
            val_loss=info and info.val_loss,
            files=sum(1 for _ in path.glob("*")),
            bytes=folder_bytes(path),
            age_s=_since(info.saved_at if info else _changed_s(path)),
            valid=False if problems else read or None,
            problems=problems,
            info=info,
        )
        items += [item] if path.exists() else []
    best, losses = None, dict[float, float]()
    with suppress(CheckpointError):
        sound = [item.path for item in items if not item.problems]
        best = catalog.best_step_of(Path(sound[-1])) if sound else None
    for record in RunLog(run).records() if items else ():
        if "val/loss" in record:
            losses[record["step"]] = record["val/loss"]
    for at, item in enumerate(items):
        known = {"best": item.step == best, "val_loss": item.val_loss or losses.get(item.step)}
        items[at] = item.model_copy(update=known)
    return items


def _paths(run: Path) -> list[Path]:
    return [catalog.checkpoint_path(run, step) for step in catalog.steps(run)]


def _changed_s(*files: Path) -> float:
    return max((file.stat().st_mtime for file in files if file.exists()), default=time.time())


def _since(then_s: float) -> float:
    return round(max(time.time() - then_s, 0.0), 1)


def _prune(run: Path, keep: int, progress: Progress) -> list[Path]:
    """Delete checkpoints of a run, and return their paths.

    Raises: CheckpointError when a process trains in the run directory.
    """
    if is_locked(run):
        raise CheckpointError(
            f"{run} is in use: its checkpoints change while it trains.",
            fix="Wait until it finishes, or stop it: its own command resumes it. "
            "checkpoint.keep sets which ones a run keeps by itself.",
        )
    with hold_lock(run, progress=progress), writing_run(run):
        items = checkpoint_items(run, read=True, progress=progress)
        best = next((item.step for item in items if item.best), None)
        config = layout.read_config(run)
        every = config.checkpoint.keep_every if config else None
        valid = {Path(item.path) for item in items if item.valid}
        deleted = catalog.prune(run, keep, best, every, is_complete=valid.__contains__)
    return [catalog.checkpoint_path(run, step) for step in deleted]


def differing(configurations: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the keys of each configuration in which runs of the same recipe differ.

    The recipe's name is included if there are several recipes.
    """

    def group(one: JsonObject, key: str) -> tuple[str, str]:
        return "" if key == "name" else one["name"], key

    values = defaultdict[tuple[str, str], set[str]](set)
    for one in configurations:
        for key, value in one.items():
            values[group(one, key)].add(repr(value))
    return [
        {
            key: value
            for key, value in one.items()
            if value is not None and len(values[group(one, key)]) > 1
        }
        for one in configurations
    ]


def _settings(path: Path) -> JsonObject:
    try:
        settings = flat(layout.read_sections(path)[layout.REQUESTED])
        return settings | {"name": str(settings.get("name", path.name))}
    except FlatoutError:  # its state is shown as damaged
        return {}


def _item(path: Path, settings: JsonObject) -> RunItem:
    log, size = RunLog(path, tail_bytes=TAIL_BYTES), folder_bytes(path)
    config, saved, end = None, list[Path](), math.inf
    with suppress(FlatoutError):
        config, saved = layout.read_config(path), _paths(path)
        end = (config and config.train.steps) or end
    if (path / catalog.CHECKPOINTS).is_symlink():
        size += sum(map(folder_bytes, saved))
    last = log.latest(end)
    written = [path / name for name in WRITTEN if (path / name).exists()]
    checkpoints = list(map(catalog.step_of, saved))
    return RunItem(
        run=str(path),
        state=log.state if config and log.is_readable else "damaged",
        step=int(last.get("step", max(checkpoints, default=0))),
        last_step=config.train.steps if config else None,
        train_loss=last.get("train/loss"),
        val_loss=last.get("val/loss"),
        checkpoints=checkpoints,
        bytes=size,
        age_s=_since(_changed_s(*(written or [path / layout.CONFIG]))),
        problems=tuple(log.notes),
        settings=settings,
    )


COMMAND = Command(runs, example="flatout runs")
