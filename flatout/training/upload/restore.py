"""Restores a run from its remote copy when its directory or all checkpoints are gone. No torch.

The name of a run directory is all that leads to its remote copy, so a different run may be there:
first, its settings and data are compared with the command's. The next start continues a restore
that was interrupted: until a checkpoint is complete, the run has none.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from flatout.config import trust
from flatout.config.schema import RunConfig
from flatout.data.sources.packed import import_package
from flatout.data.store.manifest import TOKENIZER
from flatout.data.store.mix import AnyDataset
from flatout.errors import CheckpointError, FlatoutError
from flatout.progress import SILENT, Progress
from flatout.storage.files import copy_whole, write_text
from flatout.storage.remote.folder import Altered, RemoteFolder, Wanted, pull, receive
from flatout.storage.remote.reading import open_remote
from flatout.training.checkpoint import catalog
from flatout.training.metrics.records import damage_of
from flatout.training.run_dir import layout
from flatout.training.run_dir.data_location import require_same_data, require_tokenizer
from flatout.training.run_dir.resume import continued
from flatout.training.upload.remote import (
    COMPRESSED,
    LOGGER_FILE,
    RUN_FILES,
    Record,
    RemoteCopy,
    Sender,
    Uploaded,
    read_record,
    require_elsewhere,
    upload_url,
    write_record,
)

START_WITHOUT = (
    "Choose a different run directory with --run-dir DIR, or set checkpoint.upload=none to start "
    "without it."
)
OTHER_NAME = (
    "If it is another run, choose a run directory with a different name with --run-dir DIR, or set "
    "a different checkpoint.upload."
)
CONFIGURATION = (layout.REQUESTED, layout.CONFIG)


def restore_lost(
    folder: Path,
    requested: RunConfig,
    *,
    dataset_of: Callable[[RunConfig], AnyDataset],
    resume: str = "auto",
    trust_code: bool = False,
    are_damaged: bool = False,
    progress: Progress,
) -> bool:
    """Restore a run from its remote copy if it has no checkpoint here; return whether.

    Fetched are the newest checkpoint, the best one, and the missing files of the run directory.
    `dataset_of` returns the dataset with which this command trains a configuration. `are_damaged`
    reports that the checkpoints here cannot be used.

    Raises: CheckpointError when no checkpoint there is usable, or `resume` is `never`; ConfigError
            and CheckpointError when the remote copy is of a run with other settings or data, or is
            inside the run's own directory, before anything is written here; UntrustedCode, before
            any checkpoint is fetched; DataError when the server fails; MissingPackage; OSError.
    """
    require_elsewhere(requested.checkpoint, folder)
    known = layout.read_config(folder)
    stated = requested.checkpoint.upload or (known.checkpoint.upload if known else None)
    url = upload_url(stated, folder)
    if url is None or (catalog.has_saved(folder) and not are_damaged):
        return False
    store = RemoteCopy(url)
    there = store.complete()
    if not there:
        return False
    if resume == "never":
        raise CheckpointError(
            f"--resume never would overwrite {url}, which contains the checkpoint of step "
            f"{max(there)}.",
            fix="Choose a different directory with --run-dir DIR, a different checkpoint.upload, "
            "or resume with --resume auto.",
        )
    usable = "usable checkpoint" if are_damaged else "checkpoint"
    progress.say(f"{folder} has no {usable}: restoring it from {url}.")
    sender = store.sender()
    with tempfile.TemporaryDirectory(prefix="flatout-") as work:
        copy = Path(work)
        newest = max(there)
        _fetch_description(store, there[newest], copy / f"step-{newest}")
        _require_same_run(copy, url, sender, requested, dataset_of)
        _restore_config(copy, folder, requested, trust_code)
    _restore_files(store, folder)
    if read_record(folder, url) is None:
        replaces = sender.id if sender else None
        write_record(folder, Record(id=secrets.token_hex(16), url=url, replaces=replaces))
    problems = []
    for newest in sorted(there, reverse=True):
        problem = _restore_checkpoint(store, newest, there[newest], folder, progress)
        if problem is None:
            break
        problems.append(problem)
    else:
        raise CheckpointError(
            f"No checkpoint at {url} is complete. {problems[0]}", fix=START_WITHOUT
        )
    best = catalog.best_step_of(catalog.checkpoint_path(folder, newest))
    if best is not None and best in there and best != newest:
        _restore_checkpoint(store, best, there[best], folder, progress)
    layout.append_event(folder, "restore", step=newest, url=url)
    checkpoint = catalog.checkpoint_path(folder, newest)
    info, saved = catalog.read_info(checkpoint), ""
    if info is not None:
        saved = time.strftime(", saved %Y-%m-%d %H:%M:%S UTC", time.gmtime(info.saved_at))
    progress.say(f"Restored {folder} from {url}: step {newest}{saved}{_sent_by(sender)}.")
    if (folder / layout.SUMMARY).exists():  # else the resume that follows reports it
        damage = damage_of(folder, checkpoint)
        if damage is not None:
            progress.say(damage)
    return True


def _fetch_description(store: RemoteCopy, stored: Uploaded, checkpoint: Path) -> None:
    """Fetch what identifies the run: its configuration, its tokenizer, a checkpoint's state.

    They are put beside and in `checkpoint`. If it is damaged, it is omitted: it is reported when
    it is fetched.
    """
    there = store.top.files()
    for name in (*CONFIGURATION, TOKENIZER):
        if name in there:
            _fetch(f"{store.url}/{name}", checkpoint.parent / name)
    checkpoint.mkdir()
    try:
        _pull(store.folder(stored.folder), stored.manifest, checkpoint, SILENT, only=catalog.STATE)
        catalog.recorded_environment(checkpoint)
    except (Altered, CheckpointError):
        shutil.rmtree(checkpoint)


def _require_same_run(
    copy: Path,
    url: str,
    sender: Sender | None,
    requested: RunConfig,
    dataset_of: Callable[[RunConfig], AnyDataset],
) -> None:
    """Check that `requested` continues the run that was uploaded to `url`.

    `copy` has the run's configuration and tokenizer, and the state of a checkpoint if it could be
    read. `dataset_of` returns the dataset with which this command trains a configuration. The rules
    are those for a run directory.

    Raises: ConfigError when the settings are others; CheckpointError when the tokenizer or the
            training tokens are, or there is no configuration.
    """
    try:
        stored, first = layout.read_config(copy), layout.read_requested(copy)
    except FlatoutError as error:
        raise CheckpointError(_there(error, copy, url), fix=START_WITHOUT) from error
    if stored is None:
        raise CheckpointError(f"{url} has no {layout.CONFIG}.", fix=START_WITHOUT)
    config = continued(
        stored,
        first,
        requested,
        place=url,
        sent_by=_sent_by(sender),
        fix=f"{OTHER_NAME} If it is this run, keep its settings.",
    )
    checkpoint = next(iter(copy.glob("step-*")), None)
    if checkpoint is None:
        return
    dataset = dataset_of(config)
    try:
        require_tokenizer(copy, dataset, checkpoint)
        require_same_data(copy, dataset, checkpoint)
    except CheckpointError as error:
        raise CheckpointError(
            f"{url} contains a run on other data{_sent_by(sender)}. {_there(error, copy, url)}",
            fix=f"{OTHER_NAME} If it is this run, restore its dataset.",
        ) from error


def _sent_by(sender: Sender | None) -> str:
    """Return which directory on which machine sent a run, as part of a sentence."""
    return f", sent by {sender.run} on {sender.host}" if sender else ""


def _there(error: FlatoutError, copy: Path, url: str) -> str:
    """Return what is wrong, with URLs in place of the paths of the copy."""
    return error.what.replace(str(copy), url)


def _restore_config(copy: Path, folder: Path, requested: RunConfig, trust_code: bool) -> None:
    """Store the configuration in place of one that is here: it trained the checkpoints."""
    for name in CONFIGURATION:
        if (copy / name).exists():
            copy_whole(copy / name, folder / name)
    config = layout.read_config(folder)
    assert config is not None, "the copy was checked"
    references = config.references()
    trust.require_trusted(folder, references, named=requested.references(), trust_code=trust_code)


def _restore_files(store: RemoteCopy, folder: Path) -> None:
    """Fetch the files of the run directory that are missing here."""
    there = {*store.top.files()}
    if layout.LOGGER_STATES in there:
        ids = filter(LOGGER_FILE.fullmatch, store.folder(layout.LOGGER_STATES).files())
        there |= {f"{layout.LOGGER_STATES}/{name}" for name in ids}
    for name in (*RUN_FILES, *(name for name in there if "/" in name)):
        if name in there and not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            _fetch(f"{store.url}/{name}", folder / name)


def _restore_checkpoint(
    store: RemoteCopy, step: int, stored: Uploaded, folder: Path, progress: Progress
) -> str | None:
    """Fetch a checkpoint, check it against its manifest, and return what is wrong with it.

    After a kill or an error, the files that are complete stay for the next attempt.
    """
    final = catalog.checkpoint_path(folder, step)
    work = final.with_name(f"{final.name}.tmp-restore")
    fetched = work / final.name
    fetched.mkdir(parents=True, exist_ok=True)
    remote = store.folder(stored.folder)
    try:
        _pull(remote, stored.manifest, fetched, progress)
        problems = catalog.verify(fetched, check=catalog.check_size)
    except (Altered, CheckpointError) as error:
        problems = [error.what]
    if not problems:
        catalog.publish(fetched, final)
    shutil.rmtree(work, ignore_errors=True)
    if not problems:
        return None
    problem = problems[0].replace(str(fetched), remote.url)
    progress.say(f"Checkpoint {final.name} at {store.url} cannot be used: {problem}")
    return problem


def _pull(
    remote: RemoteFolder, manifest: bytes, target: Path, progress: Progress, *, only: str = ""
) -> None:
    """Fetch the files of a checkpoint that `target` lacks, which may be compressed there.

    Raises: CheckpointError when the manifest is damaged; as `pull`.
    """
    write_text(target / catalog.MANIFEST, manifest.decode(errors="replace"))
    files = catalog.read_manifest(target).files
    for path in target.iterdir():
        if path.name != catalog.MANIFEST and path.name not in files:
            path.unlink()  # of an earlier copy of the step
    there = remote.files()

    def open_file(url: str) -> IO[bytes]:
        if f"{url.rpartition('/')[2]}{COMPRESSED}" not in there:
            return open_remote(url)
        zstandard = import_package("zstandard", url, extra="zstd")
        reader: IO[bytes] = zstandard.ZstdDecompressor().stream_reader(
            open_remote(f"{url}{COMPRESSED}")
        )
        return reader

    pull(
        remote.url,
        manifest,
        [
            Wanted(name, facts.bytes, partial(catalog.check_file, facts=facts))
            for name, facts in files.items()
            if only in ("", name)
        ],
        target,
        fix="Use a different checkpoint.",
        more_space="choose a run directory on a larger disk with --run-dir DIR",
        progress=progress,
        open_file=open_file,
    )


def _fetch(url: str, target: Path) -> None:
    with open_remote(url) as source:
        receive(source, target, url, fix=START_WITHOUT)
