"""The remote copy of a run: its files and its checkpoints at a URL. No torch.

URL/NAME/              NAME is the name of the run directory
├── config.yaml, ...   RUN_FILES, as in the run directory
└── step-N-DIGEST/     a checkpoint, with the digest of its manifest (storage/whole.py)
"""

from __future__ import annotations

import re
from pathlib import Path

from flatout.config.sections import UPLOAD_OFF, CheckpointConfig
from flatout.data.conversation.templates import CHAT_TEMPLATE, CONFIG_FILE
from flatout.data.store.manifest import TOKENIZER
from flatout.errors import ConfigError
from flatout.storage.remote.folder import RemoteFolder
from flatout.storage.remote.reading import read_if_there
from flatout.storage.remote.urls import is_local
from flatout.storage.whole import MANIFEST, name_of
from flatout.training.checkpoint import catalog
from flatout.training.run_dir.layout import (
    CONFIG,
    EVENTS,
    METRICS,
)

RUN_FILES = (CONFIG, TOKENIZER, CONFIG_FILE, CHAT_TEMPLATE, METRICS, EVENTS)
"""Files of a run directory that a resume needs or continues, in the order of restoring them."""
_NAME = re.compile(r"step-(0|[1-9][0-9]*)-[0-9a-f]{8}")


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


class RemoteCopy:
    """The remote copy of a run at a URL.

    Raises: DataError when URLs of that kind are read-only; MissingPackage. Its methods raise
            Unreachable when the server does not answer, and DataError when it rejects the request.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.top = RemoteFolder(url)
        """The files of the run directory."""

    def names(self) -> list[str]:
        """Return the names of the checkpoints there, complete or not, the newest first."""
        return sorted(filter(_NAME.fullmatch, self.top.files()), key=step_at, reverse=True)

    def manifest(self, name: str) -> bytes | None:
        """Return the manifest of a checkpoint, or None when it is incomplete or damaged."""
        content = read_if_there(f"{self.url}/{name}/{MANIFEST}")
        is_own = content and name_of(name.rpartition("-")[0], content) == name
        return content if is_own else None

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first, so that no half of it counts."""
        folder = RemoteFolder(f"{self.url}/{name}")
        folder.remove(MANIFEST)
        folder.remove()


def step_at(name: str) -> int:
    """Return the step of a checkpoint in a remote copy by its name."""
    return int(name.split("-")[1])
