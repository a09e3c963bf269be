"""Check a prepared data set, every block and count."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.commands import Command, Result
from flatout.data.store.remote import dataset_url
from flatout.data.store.verify import verify_dataset, verify_stored
from flatout.progress import SILENT, Progress
from flatout.transfer.urls import is_url


class VerifyResult(Result):
    """What `verify` found."""

    path: str
    """The folder, or the address."""
    ok: bool
    """Whether nothing is wrong."""
    problems: list[str]
    """A sentence each, with the file and the byte where there is one."""
    files: int
    """Files that the manifest names."""
    blocks: int
    """Blocks that were read, of up to 4 MiB."""
    bytes: int
    """Their bytes."""

    @property
    def exit_code(self) -> int:
        """1 when something is wrong."""
        return 0 if self.ok else 1

    def summary(self) -> str:
        """Return one line when all is well, or the problems and what to do."""
        read = f"{self.blocks:,} blocks of {self.files:,} files read, {self.bytes / 1e6:,.1f} MB"
        if self.ok:
            return f"{self.path} is whole: {read}."
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems):,} problems"
        return "\n".join(
            [
                f"{self.path} is damaged: {count}; {read}.",
                *self.problems,
                "Fix: delete it and run `flatout prepare` again, or copy it again.",
            ]
        )


def verify(
    data: Annotated[
        str | Path,
        typer.Argument(
            help="Folder written by `flatout prepare` or `flatout import`, or its address."
        ),
    ],
    *,
    progress: Progress = SILENT,
) -> VerifyResult:
    """Check a prepared data set: every file's size, every block's checksum, every id and count.

    What lies at an address is read through, as it comes, and not kept. The exit code is 1 when
    something is wrong.

    Raises: DataError when it is no data set, or the store does not answer.
    """
    place = str(data)
    found = (
        verify_stored(dataset_url(place), progress=progress)
        if is_url(place)
        else verify_dataset(Path(place), progress=progress)
    )
    return VerifyResult(
        path=str(data),
        ok=not found.problems,
        problems=list(found.problems),
        files=found.files,
        blocks=found.blocks,
        bytes=found.num_bytes,
    )


COMMAND = Command(call=verify, example="flatout verify data/book")
