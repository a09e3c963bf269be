"""Sends a whole directory to a URL, or fetches it: a run, checkpoint, dataset or export."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flatout.config.sections import CheckpointConfig
from flatout.data.store.manifest import parse_manifest, read_manifest
from flatout.errors import (
    CheckpointError,
    DataError,
    OutputInUse,
    UsageError,
    in_shell,
    without_secrets,
)
from flatout.models.families.export_mark import CARD, read_mark
from flatout.progress import Progress
from flatout.storage.files import FileEntry
from flatout.storage.json_io import object_or_none, parsing, read_json, write_json
from flatout.storage.remote.folder import RemoteFolder
from flatout.storage.remote.reading import read_if_there
from flatout.storage.remote.urls import is_url
from flatout.storage.streams import shortened
from flatout.storage.whole import MANIFEST, Listing, damage_of, entry_of, name_of, pull, push
from flatout.training.checkpoint import catalog
from flatout.training.run_dir.layout import CONFIG
from flatout.training.upload.remote import RemoteCopy, require_elsewhere, step_at
from flatout.training.upload.restore import fetch_run
from flatout.training.upload.uploader import Uploader

AGAIN = (
    "Run the same command again. If it says this again, the file there is damaged: delete it "
    "there, and send it again with `flatout push`."
)
"""The fix for a file that arrived damaged."""


def send(folder: Path, url: str, progress: Progress) -> tuple[str, int]:
    """Send a directory to `url`, and return its own URL there and the bytes sent.

    A run is sent as `checkpoint.upload` sends it. Anything else gets the digest of its manifest in
    its name, so nothing there is ever replaced. What an earlier call has sent is not sent again.

    Raises: DataError, CheckpointError when the directory is not complete, or the server fails.
    """
    folder = Path(os.path.abspath(folder))  # `..` is no name there
    url = _checked(url)
    RemoteFolder(url)  # a URL that is read-only is rejected before anything is checked here
    if (folder / CONFIG).is_file():
        if catalog.latest(folder, progress=progress) is None:
            raise CheckpointError(
                f"The run {folder} has no checkpoint yet.",
                fix="Train it first: `flatout train` saves every ten minutes and at the end.",
            )
        config = CheckpointConfig(upload=url, keep="all")
        require_elsewhere(config, folder)
        uploader = Uploader(folder, f"{url}/{folder.name}", config)
        with progress.task(f"Sending {folder}"):
            return uploader.url, uploader.send_all(with_run_files=True)
    files = _files_here(folder)
    for problem in damage_of(folder, files, progress=progress):
        raise DataError(problem, fix="Restore that file from a copy.")
    there = f"{url}/{name_of(folder.name, (folder / MANIFEST).read_bytes())}"
    return there, push(folder, there, [entry.name for entry in files], progress=progress)


def receive(url: str, folder: Path, progress: Progress) -> None:
    """Fetch the directory at a URL, of a run its newest and its best checkpoint, and check it.

    An interrupted call is continued. A directory that is here already is checked.

    Raises: OutputInUse when there is anything else; DataError when nothing complete is at the URL,
            or the server fails; OSError.
    """
    url = _checked(url)
    manifest = read_if_there(f"{url}/{MANIFEST}")
    if manifest is None:
        store = RemoteCopy(url)
        there = store.top.files()
        folders = [name for name, found in there.items() if found["type"] == "directory"]
        if len(there) == len(folders) == 1:  # the URL that was given to `push`
            receive(f"{url}/{folders[0]}", folder, progress)
            return
        if CONFIG not in there:
            inside = f" It has {shortened(sorted(there))}." if there else ""
            raise DataError(
                f"There is no whole directory at {url}: it has no {MANIFEST}.{inside}",
                fix=f"Give the URL that `flatout push` printed{', of one of these' * bool(there)}.",
            )
        if catalog.has_saved(folder) and _is_here(store, folder, progress):
            progress.say(f"{folder} has the newest checkpoint already. Nothing to do.")
            return
        if catalog.has_saved(folder) or (folder.exists() and not (folder / CONFIG).exists()):
            raise _in_use(folder)
        folder.mkdir(parents=True, exist_ok=True)
        fetch_run(store, folder, progress)
        return
    files = _files_in(manifest, url, folder)
    if folder.exists() and any(folder.iterdir()):
        here = folder / MANIFEST
        if not here.is_file() or here.read_bytes() != manifest:
            raise _in_use(folder)
        if not damage_of(folder, files, progress=progress):
            progress.say(f"{folder} has all files already. Nothing to do.")
            return
    pull(url, folder.absolute(), manifest, files, fix=AGAIN, progress=progress)


def _is_here(store: RemoteCopy, folder: Path, progress: Progress) -> bool:
    """Return whether a directory has the run of a store with its newest checkpoint, undamaged."""
    newest = next(filter(store.manifest, store.names()), None)
    here = catalog.checkpoint_path(folder, step_at(newest)) if newest else folder
    return (
        newest is not None
        and (here / MANIFEST).is_file()
        and (here / MANIFEST).read_bytes() == store.manifest(newest)
        and not damage_of(here, catalog.read_manifest(here).files, progress=progress)
    )


def _checked(url: str) -> str:
    if not is_url(url):
        raise UsageError(
            f"{url} is not a URL.",
            fix="Write s3://BUCKET/FOLDER, or file:///PATH for a directory such as a mounted disk.",
        )
    if without_secrets(url) != url:
        raise UsageError(
            f"{without_secrets(url)} must not contain a user, a password or a query.",
            fix="Give credentials as the store expects them: environment variables, a profile or a "
            "login.",
        )
    return url.rstrip("/")


def _files_here(folder: Path) -> Sequence[FileEntry]:
    if catalog.is_checkpoint(folder):
        return catalog.read_manifest(folder).files
    if not (folder / MANIFEST).is_file():
        raise DataError(
            f"{folder} is not a run, a checkpoint, a dataset or an export.",
            fix="Name one: runs/NAME, or what `flatout prepare` or `flatout export` wrote.",
        )
    if (mark := read_mark(folder)) is None:
        return read_manifest(folder).files
    card, path = folder / CARD, folder / MANIFEST
    if card.exists():  # people edit it
        document = read_json(path)
        mark.files = [entry_of(card) if one.name == CARD else one for one in mark.files]
        write_json(path, document | {"files": [one.model_dump() for one in mark.files]})
    return mark.files


def _files_in(manifest: bytes, url: str, folder: Path) -> Sequence[FileEntry]:
    """Return the files that a manifest lists, whatever it is of."""
    document = object_or_none(manifest) or {}
    if document.get("kind") == "checkpoint":
        step = f"step-{document['step']}"
        if folder.name != step:
            raise UsageError(
                f"{url} is a checkpoint, whose directory is called {step}, not {folder.name}.",
                fix=f"Give {in_shell(folder / step)}.",
            )
        return catalog.manifest_in(document, document["step"], url).files
    if document.get("kind") == "export":
        with parsing(f"{url}/{MANIFEST}"):
            return Listing.model_validate(document, strict=True).files
    return parse_manifest(manifest.decode(errors="replace"), f"{url}/{MANIFEST}").files


def _in_use(folder: Path) -> OutputInUse:
    return OutputInUse(
        f"{folder} contains other files.", fix="Name a directory that does not exist yet."
    )
