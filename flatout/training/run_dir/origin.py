"""origin.json: the checkpoint outside its own directory that a run started from."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from flatout.errors import CheckpointError
from flatout.files import sha256
from flatout.json_io import read_model, write_json
from flatout.progress import Progress
from flatout.training.checkpoint import catalog
from flatout.training.run_dir.layout import ORIGIN


class Origin(BaseModel):
    """The content of origin.json."""

    asked: str
    """The argument of --resume, as an absolute path."""
    checkpoint: str
    """The checkpoint that it resolved to."""
    before: dict[str, str | None] = {}
    """The steps that had checkpoints in the run directory at that time, with the digests of their
    manifests.
    """


def read_origin(folder: Path) -> Origin | None:
    """Return the origin of a run, or None when it started without a checkpoint.

    Raises: CheckpointError when origin.json is damaged.
    """
    path = folder / ORIGIN
    fix = f"Delete {path}: the run then resumes from its own checkpoints."
    return read_model(path, Origin, fix=fix) if path.exists() else None


def write_origin(folder: Path, *, requested: str, checkpoint: Path) -> None:
    """Store the checkpoint that a run starts from, and the checkpoints that it already has."""
    before = {str(step): _manifest_digest(folder, step) for step in catalog.steps(folder)}
    write_json(
        folder / ORIGIN,
        {"asked": requested, "checkpoint": str(checkpoint.resolve()), "before": before},
    )


def origin_checkpoint(folder: Path, origin: Origin, progress: Progress) -> Path:
    """Return the checkpoint that a run started from, when the run has saved nothing since.

    Raises: CheckpointError when it is gone or damaged.
    """
    path = Path(origin.checkpoint)
    if not path.is_dir():
        raise CheckpointError(
            f"{folder} started from {path}, which no longer exists, and has saved nothing since.",
            fix=f"Name another with --resume PATH, or delete {folder / ORIGIN} to start without "
            "one.",
        )
    progress.say(
        f"Resuming from {path}, where this run started. To start without it, delete "
        f"{folder / ORIGIN}."
    )
    catalog.require_complete(path, progress=progress)
    return path


def steps_before(folder: Path, origin: Origin | None) -> list[int]:
    """Return the steps whose checkpoints predate the origin: they belong to abandoned branches."""
    before = origin.before if origin else {}
    return [
        step
        for step in catalog.steps(folder)
        if str(step) in before and before[str(step)] == _manifest_digest(folder, step)
    ]


def _manifest_digest(folder: Path, step: int) -> str | None:
    """Return the digest of a manifest, which distinguishes checkpoints of the same step."""
    manifest = catalog.checkpoint_path(folder, step) / catalog.MANIFEST
    return sha256(manifest) if manifest.exists() else None
