"""The checkpoints of a run: which exist, are complete, and stay. No torch: listing is fast.

A checkpoint is a whole directory (storage/whole.py) called `step-N`. The functions take the run
directory, whose checkpoints are in `checkpoints`, a directory or a link to one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from flatout.config.sections import CheckpointConfig
from flatout.errors import CheckpointError
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored, sha256, sync
from flatout.storage.json_io import RESTORE, JsonObject, parsing, read_json, read_model
from flatout.storage.recognised import kind_of
from flatout.storage.whole import MANIFEST, OLD, RANDOM, Listing, problem_of, remove, sweep

FORMAT_VERSION = 2
"""Version 2 lists the files of every manifest alike."""
CHECKPOINTS = "checkpoints"
"""The directory of all checkpoints in a run directory."""
INDEX, STATE = "index.json", "state.json"
INFO = "info.json"
MODEL, OPTIMIZER = "model-", "optimizer-"
"""Start of the names of the files of tensors."""
DISK_BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""
Size = Annotated[int, Field(ge=0, strict=True)]
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


class Manifest(Listing):
    """The content of a checkpoint's manifest.json."""

    kind: Literal["checkpoint"]
    """What the directory is."""
    format_version: Annotated[int, Field(ge=1)]
    """FORMAT_VERSION of the version of flatout that wrote it."""
    step: int
    """The step at which it was saved: N of `step-N`."""


class Slice(BaseModel, frozen=True):
    """One box of a tensor, and the file that contains it."""

    file: str
    """File name in the checkpoint."""
    offset: tuple[Size, ...]
    """Where the box starts in the tensor."""
    shape: tuple[Size, ...]
    """Its shape."""
    name: str | None = None
    """Its name in the file, if that contains several boxes of the tensor. None: the tensor's."""


class Entry(BaseModel, frozen=True):
    """One tensor of a checkpoint."""

    dtype: str
    """As torch names it."""
    shape: tuple[Size, ...]
    """Shape of the whole tensor."""
    slices: tuple[Slice, ...]
    """The boxes that cover it."""


class Base(BaseModel, frozen=True):
    """The base of a LoRA checkpoint, and how the adapters are added to it."""

    path: str
    """The base: another checkpoint, or the files of another tool's model."""
    digest: str
    """Digest of its weights."""
    scale: Annotated[float, Field(allow_inf_nan=False)]
    """Factor of the adapters' output."""
    rows: dict[str, tuple[Size, Size]]
    """For each adapter, the first row of its weight, and the one after its last."""


class Index(BaseModel, frozen=True):
    """The content of a checkpoint's index.json."""

    tensors: dict[str, Entry]
    """By name."""
    aliases: dict[str, str]
    """The other names of shared weights, with the name under which they are stored."""
    base: Base | None = None
    """Of a LoRA checkpoint, which contains the adapters and their optimizer state only."""


class CheckpointInfo(Stored, extra="ignore"):
    """The content of info.json, which lists of checkpoints show. What was not measured is None."""

    step: int
    """Optimizer steps so far."""
    tokens: int
    """Tokens trained on so far."""
    train_loss: float | None = None
    """Training loss of this step, in nats per token."""
    val_loss: float | None = None
    """Validation loss at this step, in nats per token."""
    tokens_per_s: float | None = None
    """Throughput of the last record before it."""
    elapsed_s: float
    """Seconds of training, over all resumes."""
    saved_at: float
    """When the save began, in seconds since 1970."""
    config_digest: str
    """Digest of the run's resolved configuration."""
    host: str
    """The machine that wrote it. With several, that of rank 0."""
    world_size: int
    """Number of processes."""
    flatout: str
    """Version of flatout."""
    torch: str
    """Version of torch."""
    python: str
    """Version of Python."""
    metrics_bytes: int | None = None
    """The size of metrics.jsonl with the records up to this step. A resume truncates it to that."""


class OtherVersion(CheckpointError):
    """A checkpoint was written by a version of flatout with a different format."""


class NoneComplete(CheckpointError):
    """A run has checkpoints, and every one of them is damaged."""


Deep = bool | Literal["weights"]
"""What of a checkpoint is read to verify it: all of it; with `weights` all but the optimizer's
tensors, which may be missing; with False all but the tensors, whose sizes are compared.
"""


def step_of(checkpoint: Path) -> int:
    """Return the N of a checkpoint `step-N`."""
    match = _STEP.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint.",
            fix="Name a directory such as RUN/checkpoints/step-100.",
        )
    return int(match[1])


def steps(run_folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, complete or not, in ascending order."""
    return steps_in(run_folder / CHECKPOINTS)


def steps_in(folder: Path) -> list[int]:
    """Return the steps with a checkpoint in a directory of checkpoints, in ascending order."""
    if not folder.is_dir():
        return []
    return sorted(
        int(match[1])
        for path in folder.iterdir()
        if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    )


def has_saved(run_folder: Path) -> bool:
    """Return whether the run ever saved: it has checkpoints, complete or being replaced."""
    return bool(steps(run_folder)) or any((run_folder / CHECKPOINTS).glob(f"step-*{OLD}{RANDOM}"))


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`, whether it exists or not."""
    return run_folder / CHECKPOINTS / f"step-{step}"


def make_folder(path: Path) -> None:
    """Create a directory and its missing parents, whose names then survive a power cut.

    Raises: OSError.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # a directory that may be entered, not listed
            sync(folder.parent)


def existing(folder: Path) -> Path:
    """Return the absolute path of a directory, or of the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def read_manifest(checkpoint: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises: CheckpointError when it is missing, damaged, or has a newer format.
    """
    return manifest_in(read_json(checkpoint / MANIFEST), step_of(checkpoint), checkpoint)


def manifest_in(document: object, step: int, checkpoint: Path | str) -> Manifest:
    """Return the manifest of a checkpoint from its JSON, as `read_manifest`."""
    path = f"{checkpoint}/{MANIFEST}"
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version != FORMAT_VERSION:
        is_newer = version > FORMAT_VERSION
        raise OtherVersion(
            f"{checkpoint} has format {version}, of {'a newer' if is_newer else 'an earlier'} "
            f"version of flatout. This version reads format {FORMAT_VERSION}.",
            fix="Install a newer flatout."
            if is_newer
            else "Continue it with the earlier version of flatout that wrote it.",
        )
    with parsing(path):
        manifest = Manifest.model_validate(document, strict=True)
    if manifest.step != step:
        raise CheckpointError(
            f"{path} is damaged: it is the manifest of step {manifest.step}.",
            fix="Use a different checkpoint.",
        )
    return manifest


def read_index(checkpoint: Path) -> Index:
    """Return a checkpoint's index.

    Raises: CheckpointError when it is missing or damaged.
    """
    path = checkpoint / INDEX
    document = read_json(path)  # JSON has lists where the model has tuples
    with parsing(path):
        index = Index.model_validate(document)
    if lost := sorted({*index.aliases.values()} - index.tensors.keys()):
        raise CheckpointError(f"{path} is damaged: it has no tensor {lost[0]}.", fix=RESTORE)
    for name, entry in index.tensors.items():
        sizes = [each for piece in entry.slices for each in (piece.offset, piece.shape)]
        if any(len(each) != len(entry.shape) for each in sizes):
            raise CheckpointError(
                f"{path} is damaged: a slice of {name} has other dimensions than the tensor.",
                fix=RESTORE,
            )
    return index


def read_info(checkpoint: Path) -> CheckpointInfo | None:
    """Return what is known about a checkpoint. None when its info.json is missing or damaged."""
    try:
        return read_model(checkpoint / INFO, CheckpointInfo)
    except CheckpointError:
        return None


def recorded_environment(checkpoint: Path) -> JsonObject:
    """Return the environment in which a checkpoint was written.

    Raises: CheckpointError when the state cannot be read.
    """
    with parsing(checkpoint / STATE):
        return dict(read_json(checkpoint / STATE)["environment"])


def tokenizer_of(checkpoint: Path) -> str | None:
    """Return the digest of the tokenizer of a checkpoint's model. None when it states none.

    Raises: CheckpointError when the state cannot be read.
    """
    digest: str | None = recorded_environment(checkpoint).get("tokenizer")
    return digest


def digests_of(checkpoint: Path, rank: int, world_size: int) -> dict[Path, str]:
    """Return the SHA-256 of a checkpoint's files that this rank wrote, or would have written.

    Files that cannot be read are left out. So is everything without a readable manifest.
    """
    found: dict[Path, str] = {}
    with suppress(CheckpointError):
        for entry in read_manifest(checkpoint).files:
            writer = re.search(r"-(\d{5})\.", entry.name)
            if (int(writer[1]) if writer else 0) % world_size == rank:
                with suppress(OSError):
                    found[checkpoint / entry.name] = sha256(checkpoint / entry.name)
    return found


def verify(
    checkpoint: Path,
    *,
    deep: Deep = True,
    known: Mapping[Path, str] | None = None,
    progress: Progress = SILENT,
) -> list[str]:
    """Return what is wrong with a checkpoint, one sentence per file. Empty when it is complete.

    `known` is the SHA-256 of files that have been read already.
    """
    try:
        files = {entry.name: entry for entry in read_manifest(checkpoint).files}
    except CheckpointError as error:
        return [error.what]
    problems = []
    total = sum(entry.size_bytes for entry in files.values())
    with progress.task(f"Checking {checkpoint.name}", total=total, unit="bytes") as task:
        for name, entry in files.items():
            path = checkpoint / name
            is_needed = deep != "weights" or not name.startswith(OPTIMIZER)
            is_read = deep or not name.startswith((OPTIMIZER, MODEL))
            is_read = is_read and (known or {}).get(path) != entry.sha256
            if is_needed and (problem := problem_of(path, entry, deep=is_read)):
                problems.append(problem)
            task.advance(entry.size_bytes)
    if problems:
        return problems
    try:
        entries = read_index(checkpoint).tensors.values() if INDEX in files else ()
    except CheckpointError as error:
        return [error.what]
    required = {INDEX, STATE, *(piece.file for entry in entries for piece in entry.slices)}
    return [
        f"{checkpoint / name} is not in the manifest." for name in sorted(required - files.keys())
    ]


def is_checkpoint(folder: Path) -> bool:
    """Return whether a directory is a checkpoint, complete or damaged, by its name or manifest."""
    return folder.is_dir() and (
        _STEP.fullmatch(folder.name) is not None or kind_of(folder) == "checkpoint"
    )


def require_complete(checkpoint: Path, *, deep: Deep = True, progress: Progress = SILENT) -> None:
    """Check that a checkpoint is complete.

    Raises: CheckpointError naming the first file that is missing or damaged.
    """
    problems = verify(checkpoint, deep=deep, progress=progress)
    if problems:
        raise CheckpointError(
            problems[0],
            fix=f"Use a different checkpoint than {checkpoint}, or restore that file from a copy.",
        )


def latest(
    run_folder: Path,
    *,
    exclude: Collection[int] = (),
    deep: Deep = True,
    known: Mapping[Path, str] | None = None,
    progress: Progress = SILENT,
) -> Path | None:
    """Return the newest complete checkpoint, or None when the run has no checkpoint at all.

    Incomplete checkpoints are reported and skipped, the steps of `exclude` are ignored.
    Raises: OtherVersion when a newer one than that has a different format; NoneComplete when there
            are checkpoints and none is complete: a run never starts over unless the user decides
            so.
    """
    problems: list[str] = []
    for step in sorted({*steps(run_folder)} - {*exclude}, reverse=True):
        path = checkpoint_path(run_folder, step)
        found = verify(path, deep=deep, known=known, progress=progress)
        if not found:
            return path
        try:
            read_manifest(path)
        except OtherVersion:  # skipped, it would be deleted by the saves that follow
            raise
        except CheckpointError:
            pass  # it is a problem that was found
        progress.say(f"Checkpoint {path.name} cannot be used: {found[0]}")
        problems.append(found[0])
    if problems:
        raise NoneComplete(
            f"No checkpoint of {run_folder} is complete. {problems[0]}",
            fix="Restore that file from a copy, or delete the checkpoints in "
            f"{run_folder / CHECKPOINTS} to start over.",
        )
    return None


def best(newest: Path, *, deep: Deep = True, progress: Progress = SILENT) -> Path | None:
    """Return the complete checkpoint with the lowest validation loss, as `newest` states it.

    None when no loss is known, or that checkpoint is missing or incomplete. An incomplete one is
    reported.
    """
    step = best_step_of(newest)
    if step is None:
        return None
    path = newest.with_name(f"step-{step}")
    if not path.is_dir():
        return None
    if problems := verify(path, deep=deep, progress=progress):
        progress.say(f"Checkpoint {path.name} cannot be used: {problems[0]}")
    return None if problems else path


def best_step_of(checkpoint: Path) -> int | None:
    """Return the step with the lowest validation loss when a checkpoint was written, or None.

    Raises: CheckpointError when the state cannot be read.
    """
    with parsing(checkpoint / STATE):
        step = read_json(checkpoint / STATE)["values"].get("best", {}).get("step")
    return step if isinstance(step, int) else None


def remove_leftovers(run_folder: Path) -> list[str]:
    """Delete the leftovers of killed saves and deletions, as `sweep`, and return their names.

    Only the process that holds the lock may call this.
    """
    return sweep(run_folder / CHECKPOINTS, "step-*")


def delete_later(run_folder: Path, step: int) -> None:
    """Delete checkpoints of later steps than the one just saved.

    The run resumed before them because they were damaged.
    """
    for later in steps(run_folder):
        if later > step:
            remove(checkpoint_path(run_folder, later))


def newest_to_keep(config: CheckpointConfig) -> int | None:
    """Return the number of newest checkpoints that a configuration keeps. None means all."""
    return None if config.keep == "all" else config.keep


def prune(
    run_folder: Path,
    keep: int | None,
    best_step: int | None = None,
    keep_every: int | None = None,
    *,
    is_complete: Callable[[Path], bool] = lambda path: not verify(path, deep=False),
) -> list[int]:
    """Delete the checkpoints that are not to be kept, and return their steps.

    The newest `keep` complete ones stay, and all that are newer than these. So do the best one and
    the multiples of `keep_every`. With `keep=None`, or fewer complete ones than `keep`, all stay:
    incomplete ones do not count, so the last complete one is never deleted.
    No run ends because one cannot be deleted.
    """
    if keep is None:
        return []
    known = steps(run_folder)
    paths = {step: checkpoint_path(run_folder, step) for step in known}
    newest = list(islice((step for step in reversed(known) if is_complete(paths[step])), keep))
    if len(newest) < keep:
        return []
    older = [step for step in known if step < newest[-1]]
    stay = kept([*newest, *older], keep, best_step, keep_every)
    return [step for step in older if step not in stay and remove(paths[step])]


def kept(
    steps: Collection[int], keep: int | None, best_step: int | None, keep_every: int | None
) -> set[int]:
    """Return which of these steps, whose checkpoints are complete, a configuration keeps."""
    if keep is None or len(steps) < keep:
        return {*steps}
    oldest = sorted(steps)[-keep]
    return {
        step
        for step in steps
        if step >= oldest or step == best_step or is_kept_for_good(step, keep_every)
    }


def is_kept_for_good(step: int, keep_every: int | None) -> bool:
    """Return whether `checkpoint.keep_every` keeps the checkpoint of a step."""
    return bool(keep_every) and step > 0 and step % (keep_every or 1) == 0


def steps_between_saves(config: CheckpointConfig, steps_per_epoch: float) -> int | None:
    """Return how many steps lie between two saves, or None when minutes do."""
    if config.every_epochs is not None:
        return max(round(config.every_epochs * steps_per_epoch), 1)
    return config.every_steps


def most_at_once(config: CheckpointConfig, steps: int, steps_per_epoch: float) -> int:
    """Return how many checkpoints of a run of `steps` are on the disk at once, at the most.

    The newest, the best, the one being written, those kept for good, and the one being uploaded.
    With `keep=all`, saves at evaluations and by minutes are not foreseen.
    """
    newest = newest_to_keep(config)
    if newest is None:
        newest = steps // (steps_between_saves(config, steps_per_epoch) or steps or 1)
    for_good = steps // config.keep_every if config.keep_every else 0
    return newest + for_good + 2 + (config.upload is not None)
