"""Restores a run from its remote copy when its directory or all checkpoints are gone. No torch.

The name of a run directory is all that leads to its remote copy, so a different run may be there:
first, its settings are compared with the command's. The next start continues a restore that was
interrupted: until a checkpoint is complete, the run has none.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from flatout.config import trust
from flatout.config.schema import RunConfig
from flatout.errors import CheckpointError, FlatoutError
from flatout.progress import Progress, counted
from flatout.storage.files import copy_whole
from flatout.storage.json_io import object_or_none
from flatout.storage.remote.connection import NothingThere
from flatout.storage.whole import MANIFEST, PULL, Altered, fetch, pull
from flatout.training.checkpoint import catalog
from flatout.training.run_dir import layout
from flatout.training.run_dir.resume import continued
from flatout.training.run_dir.runlog import RunLog, missing_metrics
from flatout.training.upload.remote import (
    RUN_FILES,
    RemoteCopy,
    require_elsewhere,
    step_at,
    upload_url,
)

MOST_INFO = 1 << 20
"""Bytes of an info.json."""
START_WITHOUT = (
    "Choose a different run directory with --run-dir DIR, or set checkpoint.upload=none to start "
    "without it."
)


def restore_lost(
    folder: Path,
    requested: RunConfig,
    *,
    resume: str = "auto",
    trust_code: bool = False,
    are_damaged: bool = False,
    progress: Progress,
) -> bool:
    """Restore a run from its remote copy if it has no checkpoint here; return whether.

    Fetched are the newest checkpoint, the best one, and the missing files of the run directory.
    `are_damaged` reports that the checkpoints here cannot be used.

    Raises: CheckpointError when no checkpoint there is usable, or `resume` is `never`; ConfigError
            when the remote copy is of a run with other settings, or is inside the run's own
            directory, before anything is written here; UntrustedCode, before any checkpoint is
            fetched; DataError when the server fails; MissingPackage; OSError.
    """
    require_elsewhere(requested.checkpoint, folder)
    known = layout.read_config(folder)
    stated = requested.checkpoint.upload or (known.checkpoint.upload if known else None)
    url = upload_url(stated, folder)
    if url is None or (catalog.has_saved(folder) and not are_damaged):
        return False
    store = RemoteCopy(url)
    names = store.names()
    newest = next(filter(store.manifest, names), None)
    if newest is None:
        if names and not are_damaged:
            progress.say(
                f"{url} has {counted(len(names), 'checkpoint')}, but no complete one: the run "
                "starts over."
            )
        return False
    if resume == "never":
        raise CheckpointError(
            f"--resume never would overwrite {url}, which contains the checkpoint of step "
            f"{step_at(newest)}.",
            fix="Choose a different directory with --run-dir DIR, a different checkpoint.upload, "
            "or resume with --resume auto.",
        )
    usable = "usable checkpoint" if are_damaged else "checkpoint"
    progress.say(f"{folder} has no {usable}: restoring it from {url}.")
    with tempfile.TemporaryDirectory(prefix="flatout-") as work:
        copy = Path(work)
        with suppress(Altered, NothingThere):
            info = f"{url}/{newest}/{catalog.INFO}"
            fetch(info, copy / catalog.INFO, most_bytes=MOST_INFO, fix=START_WITHOUT)
        saved = _saved(copy)
        _fetch_missing(store, [layout.CONFIG], copy)
        stored = _continued(copy, url, saved, requested)
        copy_whole(copy / layout.CONFIG, folder / layout.CONFIG)  # it trained the checkpoints
    trust.require_trusted(
        folder, stored.references(), named=requested.references(), trust_code=trust_code
    )
    fetch_run(store, folder, progress)
    return True


def fetch_run(store: RemoteCopy, folder: Path, progress: Progress) -> None:
    """Fetch the newest complete checkpoint of a run, the best one, and its files that are missing.

    Raises: CheckpointError when no checkpoint there is usable; DataError when the server fails.
    """
    url, names = store.url, store.names()
    _fetch_missing(store, RUN_FILES, folder)
    problems = []
    for newest in names:
        problem = _restore_checkpoint(store, newest, folder, progress)
        if problem is None:
            break
        problems.append(problem)
    else:
        raise CheckpointError(
            f"No checkpoint at {url} is complete. {problems[0]}", fix=START_WITHOUT
        )
    step = step_at(newest)
    checkpoint = catalog.checkpoint_path(folder, step)
    best = catalog.best_step_of(checkpoint)
    for name in names:
        if step_at(name) == best != step and not _restore_checkpoint(store, name, folder, progress):
            break
    layout.append_event(folder, "restore", step=step, url=url)
    progress.say(f"Restored {folder} from {url}: step {step}{_saved(checkpoint)}.")
    info, is_finished = catalog.read_info(checkpoint), RunLog(folder).summary is not None
    if info and is_finished and (lost := missing_metrics(folder, info)):
        progress.say(lost)  # else the resume that follows reports it


def _saved(checkpoint: Path) -> str:
    """Return when and where a checkpoint was saved, as the end of a sentence, if it is known."""
    info = catalog.read_info(checkpoint)
    if info is None:
        return ""
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(info.saved_at))
    return f", saved {date} UTC on {info.host}"


def _continued(copy: Path, url: str, saved: str, requested: RunConfig) -> RunConfig:
    """Return the configuration of the run at `url`, which `copy` has, if `requested` continues it.

    Raises: ConfigError when the settings are others; CheckpointError when there are none.
    """
    try:
        stored, first = layout.read_config(copy), layout.read_requested(copy)
    except FlatoutError as error:
        what = error.what.replace(str(copy), url)
        raise CheckpointError(what, fix=START_WITHOUT) from error
    if stored is None or first is None:
        raise CheckpointError(f"{url} has no {layout.CONFIG}.", fix=START_WITHOUT)
    continued(
        stored,
        first,
        requested,
        place=url,
        sent_by=saved,
        fix="If it is another run, choose a run directory with a different name with --run-dir "
        "DIR, or set a different checkpoint.upload. If it is this run, keep its settings.",
    )
    return stored


def _fetch_missing(store: RemoteCopy, names: Iterable[str], folder: Path) -> None:
    """Fetch the files of the run directory that `folder` lacks."""
    there = store.top.files()
    for name in names:
        if name in there and not (folder / name).exists():
            fetch(f"{store.url}/{name}", folder / name, fix=START_WITHOUT)


def _restore_checkpoint(
    store: RemoteCopy, name: str, folder: Path, progress: Progress
) -> str | None:
    """Fetch a checkpoint, check it against its manifest, and return what is wrong with it.

    After a kill or an error, the files that are complete stay for the next attempt.
    """
    target, url = catalog.checkpoint_path(folder, step_at(name)), f"{store.url}/{name}"
    manifest = store.manifest(name)
    try:
        if manifest is None:
            raise Altered(f"{url}/{MANIFEST} is missing or damaged.", fix=START_WITHOUT)
        files = catalog.manifest_in(object_or_none(manifest), step_at(name), url).files
        pull(url, target, manifest, files, fix="Use a different checkpoint.", progress=progress)
    except (Altered, NothingThere, CheckpointError) as error:
        shutil.rmtree(target.with_name(target.name + PULL), ignore_errors=True)
        progress.say(f"Checkpoint {name} at {store.url} cannot be used: {error.what}")
        return error.what
    return None
