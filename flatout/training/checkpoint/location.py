"""The directory of a run's checkpoints, and which run owns it. No torch.

Without `checkpoint.dir` it is RUN/checkpoints. With `checkpoint.dir=DIR` it is DIR/NAME, where NAME
is the name of the run directory. Runs of the same name in different parents would share it, so
owner.json records which run owns it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, Field

from flatout.config.documents import read_document
from flatout.errors import CheckpointError, ConfigError
from flatout.storage.files import sync
from flatout.storage.json_io import read_json, read_model, write_json

OWNER = "owner.json"
"""In the run directory and in a directory of checkpoints outside it: the same random id in both
shows that they belong together.
"""


class Owner(BaseModel):
    """The content of owner.json."""

    id: str
    """The random id."""
    run: str
    """The run directory that it was created for."""
    path: str | None = Field(None, alias="place")
    """The directory of the checkpoints."""


def checkpoints_folder(run_folder: Path) -> Path:
    """Return the directory of a run's checkpoints, as set in its config.yaml."""
    config = run_folder / "config.yaml"
    section = read_document(config).get("checkpoint") if config.exists() else None
    directory = section.get("dir") if isinstance(section, dict) else None
    if directory is not None and not isinstance(directory, str):
        raise ConfigError(
            f"{config}: checkpoint.dir: {directory!r} is not a path.",
            fix="Restore config.yaml from a copy.",
        )
    return folder_in(directory, run_folder)


def folder_in(directory: str | None, run_folder: Path) -> Path:
    """Return the directory of a run's checkpoints when `checkpoint.dir` is `directory`."""
    return Path(directory) / run_folder.absolute().name if directory else run_folder / "checkpoints"


def existing(folder: Path) -> Path:
    """Return the absolute path of a directory, or of the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def claim(run_folder: Path, folder: Path) -> None:
    """Make `folder` the directory of this run's checkpoints.

    Raises: CheckpointError when it belongs to another run, or cannot be written.
    """
    if folder == run_folder / "checkpoints":
        return
    mine, theirs = run_folder / OWNER, folder / OWNER
    _require_same_owner(run_folder, folder)
    try:
        if not mine.exists():
            run_folder.mkdir(parents=True, exist_ok=True)
            owner = Owner(
                id=secrets.token_hex(16),
                run=str(run_folder.absolute()),
                place=str(folder.absolute()),
            )
            write_json(mine, owner.model_dump(by_alias=True))
        if not theirs.exists():
            make_folder(folder)
            write_json(theirs, read_json(mine))
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.dir: {folder} cannot be written: {error.strerror}.",
            fix="Set checkpoint.dir to a writable directory.",
        ) from error


def moved_with(path: str, anchor: Path) -> Iterator[Path]:
    """Yield where `path` may be after a directory above both it and `anchor` was renamed.

    Each directory above the anchor is tried with each tail of the old path.
    """
    parts = Path(path).parts
    tails = [Path(*parts[start:]) for start in range(1, len(parts))]
    return (above / tail for above in anchor.resolve().parents for tail in tails)


def make_folder(path: Path) -> None:
    """Create a directory and its missing parents, whose names then survive a power cut.

    Raises: OSError.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # a directory that may be entered, not listed
            sync(folder.parent)


def release(run_folder: Path) -> None:
    """Undo `claim` after a failed start, unless the directory contains checkpoints."""
    mine = run_folder / OWNER
    if not mine.exists():
        return
    with suppress(CheckpointError, OSError):
        owner = read_model(mine, Owner)
        folder = Path(owner.path) if owner.path else None
        if (
            folder
            and (folder / OWNER).exists()
            and read_model(folder / OWNER, Owner).id == owner.id
        ):
            if any(folder.glob("step-*")):
                return
            (folder / OWNER).unlink()
        if folder:
            folder.rmdir()  # fails unless it is empty
    mine.unlink(missing_ok=True)


def require_own_folder(run_folder: Path) -> None:
    """Check that the directory of the run's checkpoints belongs to this run, or to none yet.

    Raises: CheckpointError when it belongs to another run, or when it is gone: a disk that is not
            mounted must not make a run start over.
    """
    folder = checkpoints_folder(run_folder)
    if folder == run_folder / "checkpoints":
        return
    _require_same_owner(run_folder, folder)
    if (run_folder / OWNER).exists() and not (folder / OWNER).exists():
        raise CheckpointError(
            f"The checkpoints of {run_folder} are missing from {folder}.",
            fix=f"Mount that disk, restore the former name of {run_folder}, "
            f"or delete {run_folder / OWNER} to start over.",
        )


def _require_same_owner(run_folder: Path, folder: Path) -> None:
    mine, theirs = run_folder / OWNER, folder / OWNER
    if not theirs.exists():
        return
    owner = read_model(theirs, Owner)
    if not mine.exists() or read_model(mine, Owner).id != owner.id:
        raise CheckpointError(
            f"{folder} contains the checkpoints of another run, {owner.run}, not those of "
            f"{run_folder}.",
            fix="Choose a run directory with a different name with --run-dir DIR, set a different "
            "checkpoint.dir, or delete that directory.",
        )
