"""origin.json: the checkpoint from elsewhere that a run was begun from."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from flatout.errors import CheckpointError
from flatout.files import read_model, sha256, write_json
from flatout.progress import Progress
from flatout.training.checkpoint import catalog

ORIGIN = "origin.json"


class Origin(BaseModel):
    """The content of origin.json."""

    asked: str
    """What --resume named, as an absolute path."""
    checkpoint: str
    """The checkpoint that this was."""
    before: dict[str, str | None] = {}
    """The steps of which the folder held checkpoints by then, with the digest of each one's
    manifest.
    """


def read_origin(folder: Path) -> Origin | None:
    """Return what origin.json of a run directory says; None when the run began without a
    checkpoint.

    Raises: CheckpointError when the file is damaged.
    """
    path = folder / ORIGIN
    return (
        read_model(
            path, Origin, fix=f"Delete {path}: the run then resumes from its own checkpoints."
        )
        if path.exists()
        else None
    )


def write_origin(folder: Path, *, asked: str, checkpoint: Path) -> None:
    """Write down the checkpoint that a run begins from, and which checkpoints its directory holds
    by then.
    """
    before = {str(step): _mark(folder, step) for step in catalog.steps(folder)}
    write_json(
        folder / ORIGIN, {"asked": asked, "checkpoint": str(checkpoint.resolve()), "before": before}
    )


def begun_from(folder: Path, origin: Origin, progress: Progress) -> Path:
    """Return the checkpoint from which a run began that has saved nothing since.

    Raises: CheckpointError when it is gone or damaged.
    """
    path = Path(origin.checkpoint)
    if not path.is_dir():
        raise CheckpointError(
            f"{folder} was begun from {path}, which is no longer there, and has saved nothing since.",
            fix=f"Name another with --resume PATH, or delete {folder / ORIGIN} to begin without one.",
        )
    progress.say(
        f"Resuming from {path}, where this run started. To start without it, delete {folder / ORIGIN}."
    )
    catalog.require_whole(path, progress=progress)
    return path


def steps_before(folder: Path, origin: Origin | None) -> list[int]:
    """Return the steps whose checkpoints lay in the folder before the run took up its origin:
    another course left them.
    """
    before = origin.before if origin else {}
    return [
        step
        for step in catalog.steps(folder)
        if str(step) in before and before[str(step)] == _mark(folder, step)
    ]


def _mark(folder: Path, step: int) -> str | None:
    """Return what tells one checkpoint of a step from another: the digest of its manifest."""
    manifest = catalog.checkpoint_path(folder, step) / catalog.MANIFEST
    return sha256(manifest) if manifest.exists() else None
