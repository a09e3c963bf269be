"""How a run resumes: the configuration it keeps, and the checkpoint it continues from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Thread

from flatout import trust
from flatout.config.schema import RunConfig, difference, flat
from flatout.errors import CheckpointError, ConfigError, in_shell
from flatout.progress import SILENT, Progress
from flatout.recognised import recognise
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.location import OWNER, checkpoints_folder, require_own_folder
from flatout.training.run_dir.config_seal import require_unedited
from flatout.training.run_dir.data_location import data_values, moved_data
from flatout.training.run_dir.layout import (
    CONFIG,
    FREE_KEYS,
    LENGTH_KEYS,
    LOCK,
    REQUESTED,
    SUMMARY,
    UNSEALED_KEYS,
    keys_that_may_change,
    read_config,
    read_requested,
)
from flatout.training.run_dir.origin import (
    origin_checkpoint,
    read_origin,
    steps_before,
    write_origin,
)


def config_to_resume(
    folder: Path, requested: RunConfig, *, trust_code: bool = False
) -> RunConfig | None:
    """Return a run's stored configuration with the free keys and data paths of `requested`.

    None when the directory contains no run, or one that has never saved: the next start is a new
    run and may change any setting. The stored length is kept, whatever `requested` sets: whether a
    run can be made longer depends on its data (training/longer.py). Another micro-batch is accepted
    if a step keeps its tokens, and moved data: `require_tokenizer` refuses another tokenizer, and
    `require_same_data` other training tokens.
    Raises: UntrustedCode, before advice can repeat what config.yaml names; ConfigError for an
            edited config.yaml, and for keys that contradict it, such as another mix.
    """
    stored = read_config(folder)
    if stored is None:
        return None
    first = read_requested(folder)
    require_own_folder(folder)
    if not catalog.has_saved(folder) and not (folder / SUMMARY).exists():
        return None
    trust.require_trusted(
        folder, stored.references(), named=requested.references(), trust_code=trust_code
    )
    require_unedited(folder / CONFIG, stored, free=UNSEALED_KEYS)
    config, contradictions = continued(stored, first, requested)
    if contradictions:
        asked = folder / REQUESTED
        lost = "" if first is not None else f" {asked}, with the settings as requested, is missing."
        restore = "" if first is not None else f"Restore {in_shell(asked)} if there is a copy. "
        raise ConfigError(
            f"{folder} contains a run with other settings: {'; '.join(contradictions)}.{lost}",
            fix=f"{restore}Keep the stored settings, or start another run; "
            f"`--resume {in_shell(folder)} --run-dir DIR` starts it from this one. "
            f"{keys_that_may_change()}",
        )
    return config


def continued(
    stored: RunConfig, first: RunConfig | None, requested: RunConfig
) -> tuple[RunConfig, list[str]]:
    """Return `stored` with the free keys and data paths of `requested`, and what contradicts it.

    `first` is the request that the run started with, if it is known. A contradiction is a line
    with a key and both values; where there is one, the run cannot continue.
    """
    moved = moved_data(stored.data, requested.data)
    if moved is not None:
        requested = requested.with_values(data_values((first or stored).data))
    batch = _other_micro_batch(stored, requested)
    free = (*FREE_KEYS, *LENGTH_KEYS, *batch)
    contradictions = difference(stored, requested, free=free)
    if contradictions and first is not None:
        changed = {line.partition(": ")[0] for line in difference(first, requested, free=free)}
        contradictions = [line for line in contradictions if line.partition(": ")[0] in changed]
    values = {
        key: value
        for key, value in flat(requested.to_dict()).items()
        if key.startswith(FREE_KEYS) and key != "name" and value is not None
    }
    return stored.with_values(values | batch | (moved or {})), contradictions


def _other_micro_batch(stored: RunConfig, requested: RunConfig) -> dict[str, int]:
    """Return the micro-batch that `requested` states, if a step keeps its tokens; else nothing.

    It changes only the last bits of sums, and the memory that a step needs.
    """
    rows, accumulate = requested.batch.rows_per_device, requested.batch.accumulate
    if stored.batch.rows_per_device == "auto" or requested.batch.chooses_rows:
        return {}
    per_step = stored.batch.rows_per_device * (stored.batch.accumulate or 1)
    if rows == "auto":
        rows = per_step // (accumulate or 1)
    elif accumulate is None and requested.batch.tokens_per_step is not None:
        accumulate = per_step // rows
    if rows * (accumulate or 1) != per_step:
        return {}
    return {"batch.rows_per_device": rows, "batch.accumulate": accumulate or 1}


def resume_from(folder: Path, resume: str = "auto", *, progress: Progress = SILENT) -> Path | None:
    """Return the checkpoint to resume from, or None to start; call it only under the lock.

    `auto` resumes from the newest complete checkpoint of this run, or starts when it has none;
    `never` starts, and refuses a directory that is not empty; anything else is a checkpoint or a
    run directory to resume from. A checkpoint of another run is stored as this run's origin: the
    same call, or `auto`, then resumes from the newest checkpoint saved since, or else from the
    origin. The leftovers of killed saves are deleted.
    Raises: CheckpointError.
    """
    if resume == "never":
        _require_empty(folder)
        return None
    require_own_folder(folder)
    for name in catalog.remove_leftovers(folder):
        progress.say(f"Removed {name}, left by a save that was killed.")
    origin = read_origin(folder)
    path = str(Path(resume).resolve())
    of_this_run = resume == "auto" or path == str(folder.resolve())
    if of_this_run or (origin and path in (origin.asked, origin.checkpoint)):
        earlier = steps_before(folder, origin)
        with _importing("torch._dynamo"):
            newest = catalog.latest(folder, exclude=earlier, progress=progress)
        if newest is not None and not of_this_run and origin:
            progress.say(
                f"Resuming from {newest.name} of {folder}, which continues {origin.checkpoint}."
            )
        if newest is None and of_this_run and origin:
            return origin_checkpoint(folder, origin, progress)
        if newest is not None or resume == "auto":
            return newest
    checkpoint = _checkpoint_at(Path(resume), progress)
    if not is_own(checkpoint, folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_origin(folder, requested=path, checkpoint=checkpoint)
    return checkpoint


@contextmanager
def _importing(module: str) -> Iterator[None]:
    """Import a module in a thread, for a caller that computes checksums and imports nothing.

    Of torch's modules that every optimizer needs, this one takes a second to import.
    """

    def attempt() -> None:
        with suppress(Exception):  # the optimizer raises it again
            import_module(module)

    thread = Thread(target=attempt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def is_own(checkpoint: Path, folder: Path) -> bool:
    """Return whether a checkpoint is among those of the run in `folder`."""
    return checkpoint.resolve().parent == checkpoints_folder(folder).resolve()


def _require_empty(folder: Path) -> None:
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    found = sorted(name for name in names if name not in (LOCK, OWNER))
    if found:
        raise CheckpointError(
            f"--resume never would overwrite {folder}, which contains {', '.join(found[:4])}.",
            fix="Choose another directory with --run-dir DIR, delete this one, or resume with "
            "--resume auto.",
        )


def _checkpoint_at(path: Path, progress: Progress) -> Path:
    """Return the complete checkpoint at `path`, or the newest one of the run at `path`."""
    known = recognise(path)
    if known is not None and path.is_file():
        raise CheckpointError(known.instead_of("a checkpoint"), fix=known.fix)
    if not path.is_dir():
        raise CheckpointError(
            f"There is no checkpoint {path}.",
            fix="Name a directory such as RUN/checkpoints/step-100, or a run directory.",
        )
    if (path / CONFIG).exists() or (path / "checkpoints").is_dir():
        newest = catalog.latest(path, progress=progress)
        if newest is None:
            raise CheckpointError(
                f"The run {path} has no checkpoint.",
                fix="Name another run, or a directory such as RUN/checkpoints/step-100.",
            )
        return newest
    catalog.step_of(path)
    catalog.require_complete(path, progress=progress)
    return path
