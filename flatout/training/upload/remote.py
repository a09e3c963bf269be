"""The remote copy of a run: its files and its checkpoints at a URL. No torch.

URL/NAME/              NAME is the name of the run directory
├── remote.json        the run directory that sends here
├── config.yaml, ...   RUN_FILES, as in the run directory
├── loggers/           the run's ids at remote loggers
├── step-N/            the files of a checkpoint, with `.zst` appended when they are compressed;
│                      manifest.json comes last, until then upload.json is there
└── step-N.1/          the same step, saved again with other content; once it is complete, step-N is
                       deleted. Then comes step-N.2
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from flatout.config.sections import UPLOAD_OFF, CheckpointConfig
from flatout.data.conversation.templates import CHAT_TEMPLATE
from flatout.data.store.manifest import TOKENIZER
from flatout.errors import CheckpointError, ConfigError
from flatout.storage.json_io import read_model, write_json
from flatout.storage.remote.folder import RemoteFolder
from flatout.storage.remote.reading import read_if_there
from flatout.storage.remote.urls import is_local
from flatout.training.checkpoint import catalog
from flatout.training.run_dir.layout import (
    CONFIG,
    EVENTS,
    METRICS,
    ORIGIN,
    REMOTE,
    REQUESTED,
    SUMMARY,
)

FORMAT_VERSION = 1
RUN_FILES = (
    REQUESTED,
    CONFIG,
    ORIGIN,
    TOKENIZER,
    CHAT_TEMPLATE,
    METRICS,
    EVENTS,
    SUMMARY,
)
"""Files of a run directory that a resume needs or continues, in the order of restoring them."""
LOGGER_FILE = re.compile(r"\w[\w-]*\.json")
COMPRESSED = ".zst"
_FOLDER = re.compile(r"step-(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?")


class Sender(BaseModel):
    """remote.json at the URL: the run directory that sends there."""

    format_version: Annotated[int, Field(ge=1)] = FORMAT_VERSION
    """Version of this file's format."""
    id: str
    """The id in the run directory's own remote.json."""
    run: str
    """Its path."""
    host: str
    """Its machine."""


class Record(BaseModel):
    """remote.json in a run directory: where it sends its checkpoints."""

    format_version: Annotated[int, Field(ge=1)] = FORMAT_VERSION
    """Version of this file's format."""
    id: str
    """A random id."""
    url: str
    """The URL of its remote copy."""
    replaces: str | None = None
    """The id of the directory that sent there before this one was restored."""
    sent: list[int] = []
    """Steps that are there and have been here: when one is deleted here, it is deleted there."""
    sending: list[int] = []
    """The step that was sent last: after a kill it may be there, while `sent` lacks it."""


class Uploaded(NamedTuple):
    """A complete checkpoint in the remote copy."""

    folder: str
    """The name of its directory."""
    manifest: bytes
    """Its manifest, which identifies it."""


def upload_url(upload: str | None, run_folder: Path) -> str | None:
    """Return the URL of a run's remote copy when `checkpoint.upload` is `upload`, or None."""
    if upload is None or upload == UPLOAD_OFF:
        return None
    return f"{upload.rstrip('/')}/{run_folder.absolute().name}"


def require_elsewhere(config: CheckpointConfig, run_folder: Path) -> None:
    """Check that the remote copy of a run and the run's directories are not inside each other.

    Raises: ConfigError.
    """
    url = upload_url(config.upload, run_folder)
    if url is None or not is_local(url):
        return
    copy = Path(url.partition("://")[2]).resolve()
    for own in (run_folder.resolve(), (run_folder / catalog.CHECKPOINTS).resolve()):
        if copy == own or own in copy.parents or copy in own.parents:
            raise ConfigError(
                f"checkpoint.upload={config.upload}: the copy would be in {copy}, and {own} "
                "contains the run itself. What deletes one would delete the other.",
                fix="Set checkpoint.upload to a directory elsewhere, on a different disk if "
                "possible.",
            )


def read_record(run_folder: Path, url: str) -> Record | None:
    """Return the record of a run directory, or None when it has never sent anything to `url`.

    Raises: CheckpointError when it is damaged.
    """
    path = run_folder / REMOTE
    if not path.exists():
        return None
    fix = f"Delete {path} and set a different checkpoint.upload."
    record = read_model(path, Record, fix=fix)
    return record if record.url == url else None


def write_record(run_folder: Path, record: Record) -> None:
    """Store the record of a run directory."""
    write_json(run_folder / REMOTE, record.model_dump())


class RemoteCopy:
    """The remote copy of a run at a URL.

    Raises: DataError when URLs of that kind are read-only; MissingPackage. Its methods raise
            Unreachable when the server does not answer, and DataError when it rejects the request.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.top = RemoteFolder(url)
        """The files of the run directory."""

    def folder(self, name: str) -> RemoteFolder:
        """Return a directory there, such as that of a checkpoint, whether it exists or not."""
        return RemoteFolder(f"{self.url}/{name}")

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None when there is none."""
        return read_if_there(f"{self.url}/{name}")

    def folders(self) -> dict[str, int]:
        """Return the step of each directory of a checkpoint, complete or not, by its name.

        Steps ascend; of one step, the directory that was sent last comes last.
        """
        matches = [match for match in map(_FOLDER.fullmatch, self.top.files()) if match]
        matches.sort(key=lambda match: (int(match[1]), int(match[2] or 0)))
        return {match[0]: int(match[1]) for match in matches}

    def complete(self) -> dict[int, Uploaded]:
        """Return the complete checkpoints by step, in ascending order, as they were sent last."""
        return {
            step: Uploaded(name, manifest)
            for name, step in self.folders().items()
            if (manifest := self.read(f"{name}/{catalog.MANIFEST}"))
        }

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first, so that no half of it counts."""
        folder = self.folder(name)
        folder.remove(catalog.MANIFEST)
        folder.delete()

    def sender(self) -> Sender | None:
        """Return the run directory that sends here, or None when there is none.

        Raises: CheckpointError when its file is damaged.
        """
        content = self.read(REMOTE)
        try:
            return None if content is None else Sender.model_validate_json(content)
        except ValidationError as error:
            raise CheckpointError(
                f"{self.url}/{REMOTE} was not written by this version of flatout.",
                fix="Set a different checkpoint.upload.",
            ) from error

    def write_sender(self, sender: Sender) -> None:
        """Store the run directory that sends here from now on."""
        self.top.put_text(REMOTE, sender.model_dump_json() + "\n")


def next_folder(step: int, folder: str | None = None) -> str:
    """Return the name of a step's directory that comes after `folder`, the last one so far."""
    match = _FOLDER.fullmatch(folder) if folder else None
    return f"step-{step}.{int(match[2] or 0) + 1}" if match else f"step-{step}"
