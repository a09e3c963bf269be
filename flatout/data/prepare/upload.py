"""A data set to an address: prepared in the cache, in the home of the address (fetch.py), then sent
file by file, the manifest last.

An address that has a manifest is whole. Before that, `upload.json` there says whose half it is.
What was sent becomes this machine's copy of the address.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from flatout.data.prepare.inputs import CACHE
from flatout.data.prepare.options import Request, difference, open_request
from flatout.data.prepare.pipeline import Engine, Options, check_workers, local, prepare_request
from flatout.data.store.manifest import MANIFEST, FileEntry, Manifest, parse_manifest
from flatout.data.store.remote import (
    copy_of,
    home_of,
    in_cache,
    manifest_at,
    owned,
    stored_address,
    stored_blocks,
)
from flatout.data.store.shards import Dataset
from flatout.data.store.transfers import Transfers
from flatout.errors import DataError
from flatout.files import entry_of, write_text
from flatout.progress import SILENT, Progress
from flatout.sources.remote import locate, patiently, protocol_of, read_remote

CLAIM = "upload.json"
PROBE = ".flatout-probe"
FORMAT_VERSION = 1
PART_BYTES = 8 << 20
"""Larger files go in parts of this size; S3 makes the checksum it states of the parts'."""
_OPTIONS: dict[str, dict[str, Any]] = {
    **{protocol: {"chunksize": PART_BYTES, "max_concurrency": 1} for protocol in ("s3", "s3a")},
    **{protocol: {"chunksize": PART_BYTES} for protocol in ("gs", "gcs")},
}
_ONLY_READ = ("http", "https", "hf")


@dataclass(frozen=True)
class Uploaded:
    """A data set at an address, and what it took."""

    path: str
    """The address."""
    manifest: Manifest
    seconds: float
    existed: bool
    """Whether the address held this very data set before."""


class Claim(BaseModel):
    """upload.json: which data set is being sent to an address."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    manifest: str
    """SHA-256 of the manifest that comes last."""
    source: dict[str, Any]
    """What the manifest says of the text."""


def prepare_upload(
    sources: Sequence[str],
    address: str,
    options: Options,
    *,
    from_file: str | None = None,
    workers: int | None = None,
    engine: Engine = local,
    cache: Path = CACHE,
    progress: Progress = SILENT,
) -> Uploaded:
    """Prepare the data set of some sources and send it to an address, which then holds all of it,
    or has no manifest.

    Both go on where an earlier call was stopped. An address that holds this very data set is left
    as it is.

    Raises: DataError before anything is prepared when the address cannot be written or holds
            anything else; MissingPackage.
    """
    started = time.perf_counter()
    check_workers(workers)
    store = Store(address)
    home = home_of(store.address, cache)
    folder = home / "work" / home.name.rpartition("-")[0]
    with owned(home, partial(_refuse, store.address)):
        written, claim = store.look()
        if written is None:
            store.try_writing()
        request = open_request(
            sources, folder, options, from_file=from_file, cache=cache, progress=progress
        )
        if written is not None:
            manifest = parse_manifest(
                written.decode("utf-8", errors="replace"), f"{store.address}/{MANIFEST}"
            )
            _require_same(f"{store.address} holds", manifest.source, request)
            progress.say(
                f"{store.address} already holds this data set: {manifest.tokens:,} tokens. Nothing to do."
            )
        else:
            if claim is not None:
                _require_same(f"{store.address} holds half of", claim.source, request)
            progress.say(
                f"The data set is prepared in {folder.parent}, then sent to {store.address}."
            )
            manifest = _prepared(request, folder, workers, engine)
            _send(store, folder, manifest, claim, progress)
        _keep(folder, home, written)
    return Uploaded(
        store.address, manifest, time.perf_counter() - started, existed=written is not None
    )


def _refuse(address: str) -> NoReturn:
    raise DataError(
        f"Another process on this machine is preparing or fetching {address}.",
        fix="Wait for it, or choose another --out.",
    )


def _require_same(place: str, there: Mapping[str, Any], request: Request) -> None:
    different = difference(there, request.source)
    if different:
        raise DataError(
            f"{place} another data set: {different}.",
            fix="Choose another --out, or remove what is there.",
        )


def _prepared(request: Request, folder: Path, workers: int | None, engine: Engine) -> Manifest:
    """Return the manifest of the folder, in which the data set is prepared unless it is there from
    a call that could not send it.
    """
    if not (folder / MANIFEST).is_file():
        return prepare_request(request, folder, workers, engine).manifest
    manifest = Dataset.open(folder).manifest
    _require_same(f"{folder} waits to be sent and holds", manifest.source, request)
    request.progress.say(f"{folder} was prepared before.")
    return manifest


def _keep(folder: Path, home: Path, written: bytes | None) -> None:
    """Let what was prepared become this machine's copy of the address, unless there is one, or
    another manifest is `written` there.
    """
    with in_cache(home):
        if (folder / MANIFEST).is_file():
            own = (folder / MANIFEST).read_bytes()
            copy = copy_of(home, own)
            if written in (None, own) and not (copy / MANIFEST).is_file():
                shutil.rmtree(copy, ignore_errors=True)
                folder.replace(copy)
        shutil.rmtree(folder.parent, ignore_errors=True)


class Store:
    """A folder of a store, to write a data set to.

    Raises: DataError when that kind of address is only read; MissingPackage.
    """

    def __init__(self, address: str) -> None:
        self.address = stored_address(address)
        if protocol_of(address) in _ONLY_READ:
            raise DataError(
                f"{address}: addresses of this kind are only read.",
                fix="Prepare into a folder, or at s3:// or gs://, and copy it there.",
            )
        self._filesystem, self._path = locate(self.address, "write")
        self._options = _OPTIONS.get(protocol_of(address), {})

    def look(self) -> tuple[bytes | None, Claim | None]:
        """Return the manifest and the claim that are there, each None when it is not.

        Raises: DataError when anything else is there, or nothing may be known of it.
        """
        names = self.files()
        if MANIFEST in names:
            return manifest_at(self.address), None
        if CLAIM in names:
            try:
                return None, Claim.model_validate_json(read_remote(f"{self.address}/{CLAIM}"))
            except ValidationError as error:
                raise DataError(
                    f"{self.address}/{CLAIM} is not of this flatout.",
                    fix="Choose another --out, or remove what is there.",
                ) from error
        if set(names) - {PROBE}:
            raise DataError(
                f"{self.address} is not empty and is not a data set.",
                fix="Choose another --out, or remove what is there.",
            )
        return None, None

    def files(self) -> dict[str, dict[str, Any]]:
        """Return how the store describes what is in the folder, by name; nothing of a folder that
        is not there.
        """

        def find() -> dict[str, dict[str, Any]]:
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.ls(self._path, detail=True)
            except FileNotFoundError:
                return {}
            return {
                name: one
                for one in found
                if (name := one["name"].removeprefix(self._path).strip("/"))
                or one["type"] == "file"
            }

        return patiently(self.address, find)

    def describe(self, name: str) -> dict[str, Any]:
        """Return how the store describes a file."""
        return patiently(
            f"{self.address}/{name}", lambda: dict(self._filesystem.info(f"{self._path}/{name}"))
        )

    def try_writing(self) -> None:
        """Write a tiny file there and remove it.

        Raises: DataError when the store does not let that be done.
        """
        with tempfile.NamedTemporaryFile("w", prefix=PROBE) as file:
            file.write("flatout looks whether it may write here\n")
            file.flush()
            self.put(Path(file.name), PROBE)
        self.remove(PROBE)

    def put(
        self, path: Path, name: str, advance: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """Send a file; `advance` is told how many bytes, less than none where they are sent again."""
        from fsspec.callbacks import Callback

        sent = 0

        def count(size: int | None, value: int, **_: object) -> None:
            nonlocal sent
            advance(value - sent)
            sent = value

        def send() -> None:
            count(None, 0)
            self._filesystem.put_file(
                str(path),
                f"{self._path}/{name}",
                callback=Callback(hooks={"sent": count}),
                **self._options,
            )

        patiently(self.address, send, where=f"/{name}", doing="write")

    def remove(self, name: str) -> None:
        """Remove a file."""

        def act() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(f"{self._path}/{name}")

        patiently(self.address, act, where=f"/{name}", doing="write")


def _send(
    store: Store, folder: Path, manifest: Manifest, claim: Claim | None, progress: Progress
) -> None:
    """Send all files, several at once, those that an earlier call sent left out, then the manifest."""
    own = Claim(
        manifest=hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest(),
        source=manifest.source,
    )
    there = store.files() if claim == own else {}
    written = folder.parent / CLAIM
    with in_cache(written):
        write_text(written, own.model_dump_json() + "\n")
    if claim != own:
        store.put(written, CLAIM)
    entries = [*manifest.files, entry_of(folder / manifest.tokenizer.file)]
    with progress.task(
        f"Sending {store.address}",
        total=sum(entry.size_bytes for entry in entries) / 1e6,
        unit="MB",
    ) as task:
        transfers = Transfers(task)
        transfers.run(
            [
                partial(
                    _send_file, store, folder / entry.name, entry, there.get(entry.name), transfers
                )
                for entry in entries
            ]
        )
    store.put(folder / MANIFEST, MANIFEST)
    if manifest_at(store.address) != (folder / MANIFEST).read_bytes():
        store.remove(MANIFEST)
        raise _changed(store, MANIFEST)
    store.remove(CLAIM)


def _send_file(
    store: Store, path: Path, entry: FileEntry, there: dict[str, Any] | None, transfers: Transfers
) -> None:
    if there is not None and _is_same(store, there, path, entry):
        transfers.advance(entry.size_bytes)
        return
    store.put(path, entry.name, transfers.advance)
    if not _is_same(store, store.describe(entry.name), path, entry):
        raise _changed(store, entry.name)


def _changed(store: Store, name: str) -> DataError:
    return DataError(
        f"{store.address}/{name} is not what was sent.",
        fix="Run the same command again; if it stays, the store or the way to it is at fault.",
    )


def _is_same(store: Store, there: Mapping[str, Any], path: Path, entry: FileEntry) -> bool:
    """Say whether the store holds this file: by its size and, where it gives one, its MD5. Some
    encrypt, and give another number: then it is read.
    """
    if there.get("size") != entry.size_bytes:
        return False
    stated = _stated_md5(there)
    return (
        stated is None
        or stated in _md5s(path)
        or all(problem is None for _, problem in stored_blocks(store.address, entry))
    )


def _stated_md5(there: Mapping[str, Any]) -> str | None:
    """Return the MD5 in a file's description, in S3's form; None where there is none."""
    tag = str(there.get("ETag", "")).strip('"')
    if re.fullmatch(r"[0-9a-f]{32}(-\d+)?", tag):
        return tag
    return base64.b64decode(there["md5Hash"]).hex() if there.get("md5Hash") else None


def _md5s(path: Path) -> set[str]:
    """Return the MD5 of a file, and S3's of one that is sent in parts: that of its parts' MD5s, and
    how many.
    """
    whole, parts = hashlib.md5(usedforsecurity=False), []
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            whole.update(part)
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
    joined = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return {whole.hexdigest(), f"{joined}-{len(parts)}"}
