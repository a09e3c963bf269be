"""Prepare a dataset in the cache and send it to a URL, the manifest last.

A URL with a manifest contains a complete dataset. Until then, the claim there
(storage/remote/folder.py) describes the dataset being sent. The prepared directory becomes this
machine's copy of the URL.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, Unpack

from pydantic import ValidationError

from flatout.data.prepare.pipeline import (
    Engine,
    Options,
    Prepared,
    local,
    prepare_request,
)
from flatout.data.prepare.request.request import CHOOSE_ANOTHER, Access, open_request, require_same
from flatout.data.store.manifest import MANIFEST, parse_manifest
from flatout.data.store.remote import (
    cache_dir_of,
    copy_dir_of,
    dataset_url,
    explaining_cache_errors,
    locked,
)
from flatout.data.store.shards import Dataset
from flatout.errors import DataError, OutputInUse
from flatout.progress import SILENT
from flatout.storage.cache import default_cache
from flatout.storage.remote.folder import CLAIM, Claim, RemoteFolder, push
from flatout.storage.remote.parallel import transfer_all
from flatout.storage.remote.reading import read_if_there, read_remote

PROBE = ".flatout-probe"


def prepare_upload(
    sources: Sequence[str],
    url: str,
    options: Options,
    *,
    workers: int | None = None,
    engine: Engine = local,
    **access: Unpack[Access],
) -> Prepared:
    """Prepare a dataset and send it to a URL. The manifest appears once it is complete.

    Both steps resume where an earlier call stopped. A URL that already contains this dataset is
    left unchanged.

    Raises: DataError before anything is prepared when the URL cannot be written, OutputInUse when
            it contains anything else; MissingPackage.
    """
    started = time.perf_counter()
    remote = RemoteFolder(dataset_url(url))
    cache_dir = cache_dir_of(remote.url, access.get("cache") or default_cache())
    progress = access.get("progress", SILENT)
    folder = cache_dir / "work" / cache_dir.name.rpartition("-")[0]
    with locked(cache_dir, partial(_refuse, remote.url)):
        uploaded, claim = _state_of(remote)
        if uploaded is None:
            remote.put_text(PROBE, "flatout checks whether it may write here\n")
            remote.remove(PROBE)
        request = open_request(sources, folder, options, **access)
        if uploaded is not None:
            manifest = parse_manifest(
                uploaded.decode("utf-8", errors="replace"), f"{remote.url}/{MANIFEST}"
            )
            require_same(
                f"{remote.url} contains a different dataset", manifest.source, request.source
            )
            progress.say(
                f"{remote.url} already contains this dataset: {manifest.tokens:,} tokens. "
                "Nothing to do."
            )
        else:
            if claim is not None:
                what = f"{remote.url} contains an unfinished, different dataset"
                require_same(what, claim.source, request.source)
            progress.say(
                f"Preparing the dataset in {folder.parent}, then sending it to {remote.url}."
            )
            if (folder / MANIFEST).is_file():
                manifest = Dataset.open(folder).manifest
                what = f"{folder}, which waits to be sent, contains a different dataset"
                require_same(what, manifest.source, request.source)
                progress.say(f"{folder} was already prepared.")
            else:
                manifest, _ = prepare_request(request, folder, workers, engine)
            content = (folder / MANIFEST).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            entries = manifest.files
            num_bytes = sum(entry.size_bytes for entry in entries)
            own = Claim(manifest=digest, source=manifest.source)
            with push(remote, content, own, claim) as sent:  # what an earlier call has sent
                jobs = [partial(remote.send, folder / e.name, e, sent.get(e.name)) for e in entries]
                transfer_all(f"Sending {remote.url}", jobs, num_bytes, progress)
        _keep(folder, cache_dir, uploaded)
    return Prepared(remote.url, manifest, time.perf_counter() - started, uploaded is not None)


def _refuse(url: str) -> NoReturn:
    raise DataError(
        f"Another process on this machine is preparing or fetching {url}.",
        fix="Wait for it, or choose a different --out.",
    )


def _keep(folder: Path, cache_dir: Path, uploaded: bytes | None) -> None:
    """Make the prepared dataset this machine's copy of the URL, unless the URL has another now."""
    with explaining_cache_errors(cache_dir):
        if (folder / MANIFEST).is_file():
            own = (folder / MANIFEST).read_bytes()
            copy = copy_dir_of(cache_dir, own)
            if uploaded in (None, own) and not (copy / MANIFEST).is_file():
                shutil.rmtree(copy, ignore_errors=True)
                folder.replace(copy)
        shutil.rmtree(folder.parent, ignore_errors=True)


def _state_of(remote: RemoteFolder) -> tuple[bytes | None, Claim | None]:
    """Return the manifest and the claim at a URL, or None for each that is missing.

    Raises: OutputInUse when anything else is there; DataError when it cannot be read.
    """
    names = remote.files()
    if MANIFEST in names:
        return read_if_there(f"{remote.url}/{MANIFEST}"), None
    if CLAIM in names:
        try:
            return None, Claim.model_validate_json(read_remote(f"{remote.url}/{CLAIM}"))
        except ValidationError as error:
            raise OutputInUse(
                f"{remote.url}/{CLAIM} was not written by this version of flatout.",
                fix=CHOOSE_ANOTHER,
            ) from error
    if set(names) - {PROBE}:
        raise OutputInUse(f"{remote.url} is not empty and is not a dataset.", fix=CHOOSE_ANOTHER)
    return None, None
