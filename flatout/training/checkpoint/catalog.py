"""The checkpoints of a run: which exist, are complete, and stay. No torch: listing is fast.

A checkpoint is a directory `step-N`. Directories being written or deleted have `.tmp-` in their
names, and do not count as checkpoints.
The functions take the run directory, whose checkpoints are in `checkpoints`, a directory or a link
to one.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from flatout.config.sections import CheckpointConfig
from flatout.errors import CheckpointError
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored, sha256, sync
from flatout.storage.json_io import RESTORE, JsonObject, parsing, read_json, read_model

FORMAT_VERSION = 1
CHECKPOINTS = "checkpoints"
"""The directory of all checkpoints in a run directory."""
MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
INFO = "info.json"
DISK_BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""
Size = Annotated[int, Field(ge=0, strict=True)]
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


class FileFacts(BaseModel):
    """The entry of one file in a manifest."""

    bytes: Annotated[int, Field(ge=0)]
    """Its size."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The SHA-256 of its content."""


class Manifest(BaseModel):
    """The content of a checkpoint's manifest.json."""

    format_version: Annotated[int, Field(ge=1)]
    """FORMAT_VERSION of the version of flatout that wrote it."""
    step: int
    """The step at which it was saved: N of `step-N`."""
    files: dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], FileFacts]
    """Every other file of the checkpoint."""


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
    records: int | None = None
    """Lines of metrics.jsonl up to this step."""
    records_crc32: int | None = None
    """Their CRC-32, by which a resume finds out whether metrics.jsonl is whole."""


class NewerVersion(CheckpointError):
    """A checkpoint was written by a newer version of flatout."""


class NoneComplete(CheckpointError):
    """A run has checkpoints, and every one of them is damaged."""


Check = Callable[[Path, FileFacts], str | None]
"""Returns what is wrong with a file, given its entry in the manifest, or None: `check_file`, or the
quicker `check_unless` and `check_size`.
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
    return bool(steps(run_folder)) or any((run_folder / CHECKPOINTS).glob("step-*.tmp-old-*"))


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
    step, path = step_of(checkpoint), checkpoint / MANIFEST
    document = read_json(path)
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise NewerVersion(
            f"{checkpoint} has format_version {version}. This version of flatout reads up to "
            f"{FORMAT_VERSION}.",
            fix="Install a newer flatout.",
        )
    manifest = read_model(path, Manifest, fix="Use a different checkpoint.")
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


def check_size(path: Path, facts: FileFacts) -> str | None:
    """Return what is wrong with one file of a checkpoint, judged by its size, or None."""
    if not path.is_file():
        return f"{path} is missing."
    size = path.stat().st_size
    if size != facts.bytes:
        return f"{path} has {size} bytes. The manifest lists {facts.bytes}."
    return None


def check_file(path: Path, facts: FileFacts) -> str | None:
    """Return what is wrong with one file of a checkpoint, judged by its content, or None."""
    problem = check_size(path, facts)
    if problem is None and sha256(path) != facts.sha256:
        return f"{path} is damaged: its content does not match the manifest's SHA-256."
    return problem


def digests_of(checkpoint: Path, rank: int, world_size: int) -> dict[Path, str]:
    """Return the SHA-256 of a checkpoint's files that this rank wrote, or would have written.

    Files that cannot be read are left out. So is everything without a readable manifest.
    """
    found: dict[Path, str] = {}
    with suppress(CheckpointError):
        for name in read_manifest(checkpoint).files:
            writer = re.search(r"-(\d{5})\.", name)
            if (int(writer[1]) if writer else 0) % world_size == rank:
                with suppress(OSError):
                    found[checkpoint / name] = sha256(checkpoint / name)
    return found


def check_with(digests: Mapping[Path, str]) -> Check:
    """Return `check_file` that knows the SHA-256 of some files already."""

    def check(path: Path, facts: FileFacts) -> str | None:
        is_known = digests.get(path) == facts.sha256
        return (check_size if is_known else check_file)(path, facts)

    return check


def check_unless(*kinds: str) -> Check:
    """Return `check_file` that judges tensors of these kinds, optimizer or model, by their size."""
    names = tuple(f"{kind}-" for kind in kinds)

    def check(path: Path, facts: FileFacts) -> str | None:
        return (check_size if path.name.startswith(names) else check_file)(path, facts)

    return check


def verify(
    checkpoint: Path, *, check: Check = check_file, progress: Progress = SILENT
) -> list[str]:
    """Return what is wrong with a checkpoint, one sentence per file. Empty when it is complete.

    `check=check_size` does not read the weights.
    """
    try:
        files = read_manifest(checkpoint).files
    except CheckpointError as error:
        return [error.what]
    problems = []
    total = sum(facts.bytes for facts in files.values())
    with progress.task(f"Checking {checkpoint.name}", total=total, unit="bytes") as task:
        for name, facts in files.items():
            if problem := check(checkpoint / name, facts):
                problems.append(problem)
            task.advance(facts.bytes)
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
        _STEP.fullmatch(folder.name) is not None
        or all((folder / name).exists() for name in (MANIFEST, INDEX))
    )


def require_complete(
    checkpoint: Path, *, check: Check = check_file, progress: Progress = SILENT
) -> None:
    """Check that a checkpoint is complete.

    Raises: CheckpointError naming the first file that is missing or damaged.
    """
    problems = verify(checkpoint, check=check, progress=progress)
    if problems:
        raise CheckpointError(
            problems[0],
            fix=f"Use a different checkpoint than {checkpoint}, or restore that file from a copy.",
        )


def latest(
    run_folder: Path,
    *,
    exclude: Collection[int] = (),
    check: Check = check_file,
    progress: Progress = SILENT,
) -> Path | None:
    """Return the newest complete checkpoint, or None when the run has no checkpoint at all.

    Incomplete checkpoints are reported and skipped, the steps of `exclude` are ignored.
    Raises: NoneComplete when there are checkpoints and none is complete: a run never starts over
            unless the user decides so.
    """
    problems: dict[Path, str] = {}
    for step in sorted({*steps(run_folder)} - {*exclude}, reverse=True):
        path = checkpoint_path(run_folder, step)
        found = verify(path, check=check, progress=progress)
        if not found:
            return path
        progress.say(f"Checkpoint {path.name} cannot be used: {found[0]}")
        problems[path] = found[0]
    if problems:
        newest, problem = next(iter(problems.items()))
        try:
            read_manifest(newest)
        except NewerVersion:  # restoring a file would not help
            raise
        except CheckpointError:
            pass  # it is `problem`, which is reported below
        raise NoneComplete(
            f"No checkpoint of {run_folder} is complete. {problem}",
            fix="Restore that file from a copy, or delete the checkpoints in "
            f"{run_folder / CHECKPOINTS} to start over.",
        )
    return None


def best(newest: Path, *, check: Check = check_file, progress: Progress = SILENT) -> Path | None:
    """Return the complete checkpoint with the lowest validation loss, as `newest` states it.

    None when no loss is known, or that checkpoint is missing or incomplete. `newest`, which is
    complete, is not checked again.
    """
    step = best_step_of(newest)
    if step is None:
        return None
    if step == step_of(newest):
        return newest
    path = newest.with_name(f"step-{step}")
    return path if path.is_dir() and not verify(path, check=check, progress=progress) else None


def best_step_of(checkpoint: Path) -> int | None:
    """Return the step with the lowest validation loss when a checkpoint was written, or None.

    Raises: CheckpointError when the state cannot be read.
    """
    with parsing(checkpoint / STATE):
        step = read_json(checkpoint / STATE)["values"].get("best", {}).get("step")
    return step if isinstance(step, int) else None


def remove_leftovers(run_folder: Path) -> list[str]:
    """Delete the leftovers of killed saves and deletions, and return their names.

    A complete checkpoint that a killed save was replacing (`.tmp-old-`) gets its name back. Only
    the process that holds the lock may call this.
    """
    folder = run_folder / CHECKPOINTS
    removed = []
    for path in sorted(folder.glob("step-*.tmp-*")) if folder.is_dir() else []:
        original = path.with_name(path.name.partition(".")[0])
        if ".tmp-old-" in path.name and not original.exists() and (path / MANIFEST).exists():
            path.rename(original)
            continue
        shutil.rmtree(path, ignore_errors=True)  # an upload of an earlier run may delete it too
        if not path.exists():
            removed.append(path.name)
    return removed


def delete_later(run_folder: Path, step: int) -> None:
    """Delete checkpoints of later steps than the one just saved.

    The run resumed before them because they were damaged.
    """
    for later in steps(run_folder):
        if later > step:
            _delete(checkpoint_path(run_folder, later))


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name, replacing an earlier one of that name."""
    old = renamed(final, "tmp-old")
    replaces = final.exists()
    if replaces:
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def renamed(path: Path, kind: str) -> Path:
    """Return a new name for a checkpoint, under which it is none: `step-N.KIND-RANDOM`."""
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(4)}")


def newest_to_keep(config: CheckpointConfig) -> int | None:
    """Return the number of newest checkpoints that a configuration keeps. None means all."""
    return None if config.keep == "all" else config.keep


def prune(
    run_folder: Path,
    keep: int | None,
    best_step: int | None = None,
    keep_every: int | None = None,
    *,
    is_complete: Callable[[Path], bool] = lambda path: not verify(path, check=check_size),
) -> list[int]:
    """Delete the checkpoints that are not to be kept, and return their steps.

    The newest `keep` complete ones stay, and all that are newer than these. So do the best one and
    the multiples of `keep_every`. With `keep=None`, or fewer complete ones than `keep`, all stay:
    incomplete ones do not count, so the last complete one is never deleted.
    Each one is renamed before it is deleted, so that a kill never leaves a partial checkpoint.
    """
    if keep is None:
        return []
    known = steps(run_folder)
    paths = {step: checkpoint_path(run_folder, step) for step in known}
    newest = list(islice((step for step in reversed(known) if is_complete(paths[step])), keep))
    if len(newest) < keep:
        return []
    deleted = [
        step
        for step in known
        if step < newest[-1] and step != best_step and not is_kept_for_good(step, keep_every)
    ]
    return [step for step in deleted if _delete(paths[step])]


def _delete(checkpoint: Path) -> bool:
    """Delete a checkpoint, and return whether it no longer counts as one.

    Files that the system keeps, as of a process that reads them on a network disk, are deleted by
    `remove_leftovers` at the run's next start. A run does not end because of them.
    """
    gone = renamed(checkpoint, "tmp-delete")
    try:
        checkpoint.rename(gone)
    except OSError:
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


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
