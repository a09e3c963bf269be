"""Check a prepared dataset: every block and every count."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flatout.commands import Argument, Command, Result
from flatout.data.store.remote import dataset_url
from flatout.data.store.verify import verify_dataset, verify_remote
from flatout.progress import SILENT, Progress
from flatout.transfer.urls import is_url


class VerifyResult(Result):
    """The result of `verify`."""

    path: str
    """The directory, or the URL."""
    ok: bool
    """Whether the dataset is intact."""
    problems: list[str]
    """One sentence per problem, with the file and the offset where there is one."""
    files: int
    """Files listed in the manifest."""
    blocks: int
    """Blocks that were read, up to 4 MiB each."""
    bytes: int
    """Their size."""

    @property
    def exit_code(self) -> int:
        """1 if the dataset is damaged, otherwise 0."""
        return 0 if self.ok else 1

    def summary(self) -> str:
        """Return one line when the dataset is intact, or the problems and the fix."""
        read = f"{self.blocks:,} blocks of {self.files:,} files read, {self.bytes / 1e6:,.1f} MB"
        if self.ok:
            return f"{self.path} is intact: {read}."
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems):,} problems"
        fix = "Fix: delete it and run `flatout prepare` again, or copy it again."
        return "\n".join([f"{self.path} is damaged: {count}; {read}.", *self.problems, fix])


def verify(
    data: Annotated[
        str | Path,
        Argument("Directory written by `flatout prepare` or `flatout import`, or its URL."),
    ],
    *,
    progress: Progress = SILENT,
) -> VerifyResult:
    """Check a prepared dataset: file sizes, the checksum of every block, all tokens and counts.

    A dataset at a URL is streamed and not stored. The exit code is 1 if the dataset is damaged.

    Raises: DataError when it is not a dataset, or the store does not answer.
    """
    path = str(data)
    report = (
        verify_remote(dataset_url(path), progress=progress)
        if is_url(path)
        else verify_dataset(Path(path), progress=progress)
    )
    return VerifyResult(
        path=path,
        ok=not report.problems,
        problems=list(report.problems),
        files=report.files,
        blocks=report.blocks,
        bytes=report.num_bytes,
    )


COMMAND = Command(call=verify, example="flatout verify data/book")
