"""Which checkpoints a run has, and whether they are whole. No torch, so that listing them is quick.

Every function takes the run folder; `checkpoint.dir` in its config.yaml says where the checkpoints
lie. A checkpoint is the folder `step-N`. What is being written or deleted has `.tmp-` in its name,
and what was left behind has `.aside-`; neither counts as a checkpoint.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from flatout.documents import read_document
from flatout.errors import CheckpointError, ConfigError
from flatout.files import read_json, read_model, sha256, sync, understanding, write_json
from flatout.progress import SILENT, Progress

FORMAT_VERSION = 1
MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
OWNER = "owner.json"
"""In a folder of checkpoints outside its run, and in the run folder: one random id, which says that
the two belong together.
"""
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


class Owner(BaseModel):
    """The content of owner.json."""

    id: str
    """The random id."""
    run: str
    """The run folder it was made for."""
    place: str | None = None
    """The folder of checkpoints."""


class FileFacts(BaseModel):
    """What a manifest says of one file."""

    bytes: Annotated[int, Field(ge=0)]
    """Its size."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The SHA-256 of its content."""


class Manifest(BaseModel):
    """The content of a checkpoint's manifest.json."""

    format_version: Annotated[int, Field(ge=1)]
    """FORMAT_VERSION of the flatout that wrote it."""
    step: int
    """The step it was saved at: N of `step-N`."""
    files: dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], FileFacts]
    """Every other file of the checkpoint."""


def checkpoints_folder(run_folder: Path) -> Path:
    """Return where the run's checkpoints lie: RUN/checkpoints, or DIR/RUN's name where
    `checkpoint.dir` is DIR.
    """
    config = run_folder / "config.yaml"
    section = read_document(config).get("checkpoint") if config.exists() else None
    directory = section.get("dir") if isinstance(section, dict) else None
    if directory is not None and not isinstance(directory, str):
        raise ConfigError(
            f"{config}: checkpoint.dir: {directory!r} is not a path.",
            fix="Restore config.yaml from a copy.",
        )
    return place_in(directory, run_folder)


def place_in(directory: str | None, run_folder: Path) -> Path:
    """Return where checkpoints lie when `checkpoint.dir` is `directory`."""
    return Path(directory) / run_folder.absolute().name if directory else run_folder / "checkpoints"


def claim(run_folder: Path, place: Path) -> None:
    """Make `place` the folder of this run's checkpoints. Runs of one name that share
    `checkpoint.dir` would take each other's.

    Raises: CheckpointError when it is another run's, or cannot be written.
    """
    if place == run_folder / "checkpoints":
        return
    mine, theirs = run_folder / OWNER, place / OWNER
    _require_not_foreign(run_folder, place)
    try:
        if not mine.exists():
            run_folder.mkdir(parents=True, exist_ok=True)
            write_json(
                mine,
                {
                    "id": secrets.token_hex(16),
                    "run": str(run_folder.absolute()),
                    "place": str(place.absolute()),
                },
            )
        if not theirs.exists():
            place.mkdir(parents=True, exist_ok=True)
            write_json(theirs, read_json(mine))
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.dir: {place} cannot be written: {error.strerror}.",
            fix="Set checkpoint.dir to a folder you may write to.",
        ) from error


def release(run_folder: Path) -> None:
    """Undo `claim` for a run that came to nothing: another start may claim the place. Where
    checkpoints lie, the claim stays.
    """
    mine = run_folder / OWNER
    if not mine.exists():
        return
    with suppress(CheckpointError, OSError):
        owner = read_model(mine, Owner)
        place = Path(owner.place) if owner.place else None
        if place and (place / OWNER).exists() and read_model(place / OWNER, Owner).id == owner.id:
            if any(place.glob("step-*")):
                return
            (place / OWNER).unlink()
        if place:
            place.rmdir()  # where it holds nothing
    mine.unlink(missing_ok=True)


def require_own(run_folder: Path) -> None:
    """Do nothing when the folder of the run's checkpoints is this run's, or nobody's yet.

    Raises: CheckpointError when it is another run's, or when it has gone: a disk that is not
            mounted must not start a run over.
    """
    place = checkpoints_folder(run_folder)
    if place == run_folder / "checkpoints":
        return
    _require_not_foreign(run_folder, place)
    if (run_folder / OWNER).exists() and not (place / OWNER).exists():
        raise CheckpointError(
            f"The checkpoints of {run_folder} are not in {place}, where they belong.",
            fix=f"Mount that disk, give {run_folder} its old name back, or delete {run_folder / OWNER} to start over.",
        )


def _require_not_foreign(run_folder: Path, place: Path) -> None:
    mine, theirs = run_folder / OWNER, place / OWNER
    if not theirs.exists():
        return
    owner = read_model(theirs, Owner)
    if not mine.exists() or read_model(mine, Owner).id != owner.id:
        raise CheckpointError(
            f"{place} holds the checkpoints of another run, {owner.run}, not those of {run_folder}.",
            fix="Give this run a folder of another name with --run-dir DIR, set another checkpoint.dir, or delete what lies there.",
        )


def step_of(checkpoint: Path) -> int:
    """Return N of a checkpoint folder `step-N`."""
    match = _STEP.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint.",
            fix="Name a folder such as RUN/checkpoints/step-100.",
        )
    return int(match[1])


def steps(run_folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, in rising order, whether they are whole or not."""
    folder = checkpoints_folder(run_folder)
    if not folder.is_dir():
        return []
    return sorted(
        int(match[1])
        for path in folder.iterdir()
        if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    )


def has_saved(run_folder: Path) -> bool:
    """Say whether the run has ever saved, as far as its folder shows: checkpoints whole or not, set
    aside, or being replaced.
    """
    folder = checkpoints_folder(run_folder)
    return bool(steps(run_folder)) or any(
        True for kind in ("tmp-old", "aside") for _ in folder.glob(f"step-*.{kind}-*")
    )


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`, whether it exists or not."""
    return checkpoints_folder(run_folder) / f"step-{step}"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest: `step`, and `files` with the bytes and the SHA-256 of each.

    Raises: CheckpointError when it is missing, damaged, or of a newer format.
    """
    step, path = step_of(checkpoint), checkpoint / MANIFEST
    document = read_json(path)
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{checkpoint} has format_version {version}; this flatout reads up to {FORMAT_VERSION}.",
            fix="Install a newer flatout.",
        )
    manifest = read_model(path, Manifest, fix="Use another checkpoint.")
    if manifest.step != step:
        raise CheckpointError(
            f"{path} is damaged: it is of step {manifest.step}.", fix="Use another checkpoint."
        )
    return manifest.model_dump()


def verify(checkpoint: Path, *, only: str = "", progress: Progress = SILENT) -> list[str]:
    """Return what is wrong with a checkpoint, a sentence a file; an empty list when it is whole.

    `only` restricts the check to files whose names begin with it.
    """
    try:
        files = read_manifest(checkpoint)["files"]
    except CheckpointError as error:
        return [error.what]
    problems = []
    wanted = {name: facts for name, facts in files.items() if name.startswith(only)}
    with progress.task(
        f"Checking {checkpoint.name}",
        total=sum(facts["bytes"] for facts in wanted.values()),
        unit="bytes",
    ) as task:
        for name, facts in wanted.items():
            problem = check_file(checkpoint / name, facts)
            if problem:
                problems.append(problem)
            task.advance(facts["bytes"])
    return problems or [
        f"{checkpoint / name} is not in the manifest."
        for name in sorted(_needed(checkpoint) - set(files))
        if name.startswith(only)
    ]


def tokenizer_of(checkpoint: Path) -> str | None:
    """Return the digest of the tokenizer that the model in a checkpoint was trained with; None
    where an earlier version wrote it.

    Raises: CheckpointError when the state cannot be read.
    """
    path = checkpoint / STATE
    with understanding(path):
        digest = read_json(path)["environment"].get("tokenizer")
    return digest if digest is None else str(digest)


def _needed(checkpoint: Path) -> set[str]:
    """Return the files without which a checkpoint cannot be read; those that its index names only
    where there is an index.
    """
    path = checkpoint / INDEX
    if not path.is_file():
        return {INDEX, STATE}
    with understanding(path):
        return {
            INDEX,
            STATE,
            *(
                piece["file"]
                for entry in read_json(path)["tensors"].values()
                for piece in entry["slices"]
            ),
        }


def check_size(path: Path, facts: dict[str, Any]) -> str | None:
    """Return what is wrong with one file of a checkpoint as far as its size tells, or None."""
    if not path.is_file():
        return f"{path} is missing."
    size = path.stat().st_size
    if size != facts["bytes"]:
        return f"{path} has {size} bytes; the manifest says {facts['bytes']}."
    return None


def check_file(path: Path, facts: dict[str, Any]) -> str | None:
    """Return what is wrong with one file of a checkpoint, by its line in the manifest, or None."""
    problem = check_size(path, facts)
    if problem is not None:
        return problem
    if sha256(path) != facts["sha256"]:
        return f"{path} is damaged: its content does not match the manifest's SHA-256."
    return None


def is_checkpoint(folder: Path) -> bool:
    """Say whether a folder is a checkpoint, whole or damaged, by its name or its manifest."""
    return folder.is_dir() and (
        _STEP.fullmatch(folder.name) is not None
        or all((folder / name).exists() for name in (MANIFEST, INDEX))
    )


def require_whole(checkpoint: Path, *, progress: Progress = SILENT) -> None:
    """Do nothing when the checkpoint is whole.

    Raises: CheckpointError naming the first file that is missing or damaged.
    """
    problems = verify(checkpoint, progress=progress)
    if problems:
        raise CheckpointError(
            problems[0],
            fix=f"Use another checkpoint than {checkpoint}, or restore that file from a copy.",
        )


def latest(
    run_folder: Path, *, but: Collection[int] = (), progress: Progress = SILENT
) -> Path | None:
    """Return the newest whole checkpoint, or None when there is no checkpoint at all. One that is
    not whole is passed over aloud.

    The steps of `but` do not count.
    Raises: CheckpointError when there are checkpoints and none is whole: starting over must be a
            decision.
    """
    problems: list[str] = []
    for step in sorted({*steps(run_folder)} - {*but}, reverse=True):
        path = checkpoint_path(run_folder, step)
        found = verify(path, progress=progress)
        if not found:
            return path
        progress.say(f"Checkpoint {path.name} cannot be used: {found[0]}")
        problems.append(found[0])
    if problems:
        raise CheckpointError(
            f"No checkpoint of {run_folder} is whole. {problems[0]}",
            fix=f"Restore that file from a copy, or delete the checkpoints in {checkpoints_folder(run_folder)} to start over.",
        )
    return None


def best(run_folder: Path, *, progress: Progress = SILENT) -> Path | None:
    """Return the whole checkpoint with the lowest validation loss, or None when none is known or it
    is no longer there.
    """
    newest = latest(run_folder, progress=progress)
    if newest is None:
        return None
    with understanding(newest / STATE):
        best_step = read_json(newest / STATE)["values"].get("best", {}).get("step")
    if not isinstance(best_step, int):
        return None
    path = checkpoint_path(run_folder, best_step)
    return path if path.is_dir() and not verify(path, progress=progress) else None


def prune(run_folder: Path, keep: int, best_step: int | None = None) -> list[int]:
    """Delete all but the newest `keep` checkpoints and the best one; return the steps that were
    deleted.

    Each disappears under one rename, so that a kill leaves no half of a checkpoint behind.
    """
    kept = {*steps(run_folder)[-keep:], best_step}
    deleted = [step for step in steps(run_folder) if step not in kept]
    for step in deleted:
        path = checkpoint_path(run_folder, step)
        doomed = path.with_name(f"{path.name}.tmp-delete-{secrets.token_hex(4)}")
        path.rename(doomed)
        shutil.rmtree(doomed)
    return deleted


def clean(run_folder: Path) -> list[str]:
    """Remove what killed saves and deletions left behind; return its names. Only for the process
    that holds the lock.

    A whole checkpoint that was being replaced by another of the same step (`.tmp-old-`) is put back
    when the new one did not come.
    """
    folder = checkpoints_folder(run_folder)
    removed = []
    for path in sorted(folder.glob("step-*.tmp-*")) if folder.is_dir() else []:
        original = path.with_name(path.name.partition(".")[0])
        if ".tmp-old-" in path.name and not original.exists() and (path / MANIFEST).exists():
            path.rename(original)
            continue
        shutil.rmtree(path)
        removed.append(path.name)
    return removed


def set_aside(run_folder: Path, *, after: int) -> list[Path]:
    """Rename checkpoints of later steps than `after`, so that they no longer count; return their
    new names.

    They belong to a course that the run left when it was resumed from an earlier step. Nothing is
    deleted.
    """
    moved = []
    for step in steps(run_folder):
        if step > after:
            path = checkpoint_path(run_folder, step)
            moved.append(path.rename(path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}")))
    return moved


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name in one rename; one that has the name already makes room
    first.
    """
    old = final.with_name(f"{final.name}.tmp-old-{secrets.token_hex(4)}")
    replaces = final.exists()
    if replaces:
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    if replaces:
        shutil.rmtree(old)
