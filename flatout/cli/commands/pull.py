"""Fetch a whole directory from a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command
from flatout.config.signature import Argument, checked
from flatout.progress import SILENT, Progress
from flatout.storage.files import expanded, writing
from flatout.storage.json_io import Result
from flatout.training.upload.transfer import receive


class PullResult(Result):
    """A directory that was fetched."""

    path: str
    """The directory."""

    @property
    def headline(self) -> str:
        """The directory."""
        return self.path


@checked
def pull(
    url: Annotated[
        str,
        Argument(
            "The URL that `flatout push` printed, of an uploaded run, or with one of them in it."
        ),
    ],
    path: Annotated[str | Path, Argument("The directory to write.")],
    *,
    progress: Progress = SILENT,
) -> PullResult:
    """Fetch a run, a checkpoint, a dataset or an export from a URL.

    Each file is checked when it has arrived, and the directory gets its name when it is complete.
    Of a run, the newest complete checkpoint and the best one come, with its configuration, journal
    and metrics: `flatout train` continues it. An interrupted call is continued by the same command.

    Raises: OutputInUse when the directory has other files; DataError when nothing complete is at
            the URL, or the server fails.
    """
    folder = expanded(path)
    with writing(folder):
        receive(url, folder, progress)
    return PullResult(path=str(folder))


COMMAND = Command(
    pull,
    example="flatout pull s3://my-bucket/datasets/book-1f3a9c20 data/book",
    writes_files=True,
)
