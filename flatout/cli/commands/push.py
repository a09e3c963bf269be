"""Send a whole directory to a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command
from flatout.cli.commands.verify import run_at
from flatout.config.signature import Argument, checked
from flatout.display import amount
from flatout.progress import SILENT, Progress
from flatout.storage.files import expanded
from flatout.storage.json_io import Result
from flatout.training.upload.transfer import send


class PushResult(Result):
    """A directory that was sent."""

    path: str
    """Its URL, for `flatout pull`."""
    bytes: int
    """Bytes that this call sent or found there."""

    @property
    def headline(self) -> str:
        """The URL and the bytes."""
        return f"{self.path}  ({amount(self.bytes, 'bytes')})"


@checked
def push(
    path: Annotated[
        str | Path,
        Argument("A run or its name under runs/, a checkpoint, a dataset or an export."),
    ],
    url: Annotated[
        str, Argument("Where to: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER.")
    ],
    *,
    progress: Progress = SILENT,
) -> PushResult:
    """Send a run, a checkpoint, a dataset or an export to a URL.

    It is checked first, and each file again when it has arrived. The manifest comes last, so what
    is there is complete or does not count. Its name gets the digest of its manifest: nothing there
    is ever replaced. An interrupted call is continued by the same command, which compares the
    files there by their size (`flatout pull` checks their content). To the Hugging Face hub, use
    `hf upload ORG/NAME DIR`.

    Raises: DataError, CheckpointError when the directory is not complete, or the server fails.
    """
    folder = expanded(path)
    there, num_bytes = send(run_at(folder) or folder, url, progress)
    return PushResult(path=there, bytes=num_bytes)


COMMAND = Command(push, example="flatout push data/book s3://my-bucket/datasets", writes_files=True)
