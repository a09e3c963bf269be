"""List the checkpoints of a run, and whether each is valid."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from flatout.cli.commands import Command, RunName
from flatout.config.signature import Option, checked
from flatout.display import age, aligned, amount, optional
from flatout.errors import CheckpointError, ConfigError, in_shell
from flatout.measure.runlog import RunLog
from flatout.progress import SILENT, Progress, counted
from flatout.storage.files import Stored, folder_bytes, writing_run
from flatout.storage.json_io import Result
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import CheckpointInfo, read_info
from flatout.training.checkpoint.location import require_own_folder
from flatout.training.run_dir import layout, lookup
from flatout.training.run_dir.lock import hold_lock, is_locked

State = Literal["valid", "sizes match", "not valid"]


class CheckpointItem(Stored):
    """One checkpoint."""

    path: str
    """Its directory."""
    step: int
    """Optimizer steps before it."""
    state: State
    """Whether all of its files are there and match its manifest. With --quick only their sizes."""
    valid: bool | None
    """Whether its state is `valid`. Null if only sizes were compared, and match."""
    problems: list[str]
    """Why it is not valid: one sentence per file."""
    best: bool | None = None
    """Whether it has the lowest validation loss of the run. Null with --quick, which does not check
    the file with that loss."""
    train_loss: float | None
    """Training loss at this step, in nats per token."""
    val_loss: float | None
    """Validation loss at this step, in nats per token."""
    bytes: int
    """Its size."""
    age_s: float
    """Seconds since it was saved."""
    info: CheckpointInfo | None
    """What it states about itself. Null if an earlier version wrote it, or it is not readable."""


class AsideItem(Stored):
    """A checkpoint that was set aside: the run went back to an earlier step."""

    path: str
    """Its directory."""
    bytes: int
    """Its size."""
    age_s: float
    """Seconds since it was saved."""


class CheckpointsResult(Result):
    """The checkpoints of a run, by step."""

    run: str
    """The run directory."""
    items: list[CheckpointItem]
    """One object per checkpoint."""
    aside: list[AsideItem]
    """Checkpoints that were set aside. They do not count, and take space."""
    removed: list[str]
    """The directories that this command deleted."""

    def summary(self) -> str:
        """Return a table of the checkpoints, then those set aside, and what was deleted."""
        lines = [f"Deleted {path}" for path in self.removed]
        if self.items:
            total = amount(sum(item.bytes for item in self.items), "bytes")
            lines.append(f"{self.run}: {counted(len(self.items), 'checkpoint')}, {total}")
            rows = [
                (
                    f"{item.step:,}",
                    *(optional(loss, ".4f") for loss in (item.train_loss, item.val_loss)),
                    amount(item.bytes, "bytes"),
                    age(item.age_s),
                    f"{item.state}, best" if item.best else item.state,
                )
                for item in self.items
            ]
            lines += aligned([("step", "loss", "val loss", "size", "age", "state"), *rows], left=0)
            lines += [item.problems[0] for item in self.items if item.problems]
        else:
            lines.append(
                f"{self.run} has no checkpoint yet: `flatout train` saves every ten minutes, or as "
                "checkpoint.every_steps sets, and at the end."
            )
        if self.aside:
            lines.append("Set aside, because the run went back to an earlier step:")
            lines += aligned(
                [
                    (f"  {Path(one.path).name}", amount(one.bytes, "bytes"), age(one.age_s))
                    for one in self.aside
                ]
            )
            lines.append(f"`flatout checkpoints {in_shell(self.run)} --remove-aside` deletes them.")
        return "\n".join(lines)


@checked
def checkpoints(
    run: RunName = None,
    quick: Annotated[
        bool, Option("Compare the sizes of files only. Otherwise each is read in full.")
    ] = False,
    keep: Annotated[
        int | None,
        Option(
            "Delete all but the newest N valid checkpoints, the best one, and those that "
            "checkpoint.keep_every keeps.",
            min=1,
        ),
    ] = None,
    remove_aside: Annotated[
        bool,
        Option("Delete the checkpoints that were set aside when the run went back to a step."),
    ] = False,
    *,
    progress: Progress = SILENT,
) -> CheckpointsResult:
    """List the checkpoints of a run: step, loss, size, age, and whether each is valid.

    Nothing is deleted without --keep or --remove-aside, and never the last valid checkpoint.

    Raises: CheckpointError when there is no such run, or it is running and something is to be
            deleted; ConfigError when `keep` and `quick` are both set.
    """
    if keep is not None and quick:
        raise ConfigError(
            "--keep deletes all but the newest valid checkpoints, and --quick does not find out "
            "which ones are valid.",
            fix="Remove --quick.",
        )
    folder = lookup.run_or_newest(run, progress=progress)
    items = _items(folder, progress, quick=quick)
    removed = _remove(folder, items, keep, remove_aside=remove_aside, progress=progress)
    return CheckpointsResult(
        run=str(folder),
        items=[item for item in items if item.path not in removed],
        aside=[
            AsideItem(path=str(path), bytes=folder_bytes(path), age_s=_age_s(path, None))
            for path in catalog.aside_paths(folder)
        ],
        removed=removed,
    )


def _items(folder: Path, progress: Progress, *, quick: bool) -> list[CheckpointItem]:
    """Return the checkpoints of a run. Those that a running process deletes meanwhile are omitted.

    A loss that a checkpoint does not state is that of the record of its step in metrics.jsonl.
    """
    steps = catalog.steps(folder)
    losses: dict[float, dict[str, float | None]] = {step: {} for step in steps}
    for record in RunLog(folder).records() if steps else ():
        if record["step"] in losses:
            losses[record["step"]] |= record
    found = []
    check = catalog.check_size if quick else catalog.check_file
    for step in steps:
        path = catalog.checkpoint_path(folder, step)
        try:
            problems = catalog.verify(path, check=check, progress=progress)
        except OSError as error:
            problems = [f"{error.filename or path} cannot be read: {error.strerror}."]
        if not path.exists():
            continue
        info = read_info(path)
        stated = {"train/loss": info and info.train_loss, "val/loss": info and info.val_loss}
        known = losses[step] | {name: loss for name, loss in stated.items() if loss is not None}
        found.append(
            CheckpointItem(
                path=str(path),
                step=step,
                state="not valid" if problems else "sizes match" if quick else "valid",
                valid=None if quick and not problems else not problems,
                problems=problems,
                train_loss=known.get("train/loss"),
                val_loss=known.get("val/loss"),
                bytes=folder_bytes(path),
                age_s=_age_s(path, info),
                info=info,
            )
        )
    if quick:
        return found
    newest, best = next((item for item in reversed(found) if item.valid), None), None
    with suppress(CheckpointError):
        best = catalog.best_step_of(Path(newest.path)) if newest else None
    return [item.model_copy(update={"best": item.step == best}) for item in found]


def _age_s(path: Path, info: CheckpointInfo | None) -> float:
    """Return the seconds since a checkpoint was saved, by its own statement or its last change."""
    written = (one.stat().st_mtime for one in (path / catalog.MANIFEST, path) if one.exists())
    saved_at = next(written, time.time()) if info is None else info.saved_at
    return round(max(time.time() - saved_at, 0.0), 1)


def _remove(
    folder: Path,
    items: list[CheckpointItem],
    keep: int | None,
    *,
    remove_aside: bool,
    progress: Progress,
) -> list[str]:
    """Delete checkpoints, if that is asked for, and return their paths.

    Raises: CheckpointError when a process trains in the run directory.
    """
    if keep is None and not remove_aside:
        return []
    if is_locked(folder):
        raise CheckpointError(
            f"{folder} is in use: its checkpoints change while it trains.",
            fix="Wait until it finishes, or stop it: its own command resumes it. "
            "checkpoint.keep sets which ones a run keeps by itself.",
        )
    require_own_folder(folder)
    removed = []
    with hold_lock(folder, progress=progress), writing_run(folder):
        if keep is not None:
            config = layout.read_config(folder)
            best = next((item.step for item in items if item.best), None)
            valid = {Path(item.path) for item in items if item.valid}
            deleted = catalog.prune(
                folder,
                keep,
                best,
                config.checkpoint.keep_every if config else None,
                is_complete=valid.__contains__,
            )
            removed += [str(catalog.checkpoint_path(folder, step)) for step in deleted]
        for path in catalog.aside_paths(folder) if remove_aside else ():
            catalog.delete_aside(path)
            removed.append(str(path))
    return removed


COMMAND = Command(checkpoints, example="flatout checkpoints runs/demo")
