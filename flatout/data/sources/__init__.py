"""Sources of text, one per file.

A source is a function with keyword parameters, which its file exports as `SOURCE`. It yields
documents (or plain strings), or returns a list of `ReadTask`s so that several processes can read
it. Tasks have a fixed order, and a task read twice yields the same documents: the order of
documents is part of a dataset.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flatout.data.conversation.rendering import Examples
from flatout.data.sources.listing import InputFile
from flatout.data.sources.packed import open_bytes, unreadable
from flatout.errors import DataError
from flatout.storage.json_io import JsonObject
from flatout.storage.remote.urls import is_url

FIRST_NAMED = 10
"""Number of rows named among those omitted for the same reason."""


@dataclass(frozen=True, slots=True)
class RowLocation:
    """The location of a row in a file. Its line number is found only for messages."""

    name: str
    """The file."""
    offset: int
    """First byte of the row."""

    def __str__(self) -> str:
        """Return `FILE, line N`, or `FILE, byte N` if the file cannot be read again."""
        with suppress(OSError, EOFError, zlib.error):
            if not is_url(self.name):
                return f"{self.name}, line {line_number(self.name, self.offset)}"
        return f"{self.name}, byte {self.offset}"


Location = RowLocation | str
"""A row of a file, or else what messages call it: the file, or `FILE, row N`."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its origin."""

    text: str
    location: Location
    prompt: str = ""
    """Text before the document, excluded from the loss."""
    examples: Examples = ()
    """The examples of a conversation, and `text` is that of all. Empty for other documents."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that should have been a document. `--on-bad-row` raises it, or skips and counts it."""

    what: str
    """The problem, as the rest of a sentence that starts with the location: `is not JSON`."""
    fix: str
    """How to repair it."""
    reason: str
    """A short reason under which such rows are counted."""
    location: Location
    unread_bytes: int = 0
    """Approximate bytes of text lost, when the row represents the rest of a damaged piece."""
    count: int = 1
    """Number of rows that this one represents, itself included."""
    other_field: str | None = None
    """The field that the fix suggests instead of one that the row lacks."""

    @property
    def error(self) -> DataError:
        """The error to raise."""
        return BadRowError(f"{self.location} {self.what}.", fix=self.fix, other=self.other_field)


class BadRowError(DataError):
    """A row cannot be used."""

    def __init__(self, what: str, *, fix: str, other: str | None = None) -> None:
        super().__init__(what, fix=fix)
        self.other_field = other


CANNOT_BE_READ = "cannot be read"
"""Reason under which the rest of a damaged file is counted."""


def unread(path: str, where: str, error: Exception, num_bytes: int) -> BadRow:
    """Return the bad row for a damaged part of a file, which counts as lost entirely.

    Raises: NotHandedOut when the system does not let flatout read the file.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise unreadable(path, error) from error
    message = " ".join(str(error).split()).rstrip(".")
    fix = "Check that the file is complete. --on-bad-row skip skips the unreadable rest."
    return BadRow(f"cannot be read: {message}", fix, CANNOT_BE_READ, where, num_bytes)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A document that a source omits by its own rule: counted, never an error."""

    reason: str
    location: Location
    count: int = 1
    """Number of documents that this one represents, itself included."""


Row = Document | BadRow | LeftOut


@dataclass(frozen=True)
class ReadTask:
    """The part of a source that one process reads, pickled: `read` is a module's function."""

    read: Callable[..., Iterable[Row | str]]
    arguments: tuple[Any, ...]
    fingerprint: str
    """Changes with the documents. Empty when an earlier task's fingerprint covers them."""
    num_bytes: int = 0
    """Approximate bytes to read. 0 when unknown."""
    files: tuple[InputFile, ...] = ()
    """The files covered by the fingerprint, as they were when listed."""
    skipped: tuple[LeftOut, ...] = ()
    """Files that were skipped while searching for those of all tasks."""

    def rows(self) -> Iterator[Row]:
        """Yield the skipped files, then the rows. A document without text becomes a `LeftOut`."""
        yield from self.skipped
        found = enumerate(self.read(*self.arguments))
        rows = (Document(row, f"document {i}") if isinstance(row, str) else row for i, row in found)
        for document in rows:
            if isinstance(document, Document) and not document.text:
                yield LeftOut("empty document", document.location)
            else:
                yield document


Source = Callable[..., Sequence[ReadTask] | Iterable[Row | str]]


def read_tasks_of(source: Source, name: str, parameters: JsonObject) -> list[ReadTask]:
    """Call a source with `parameters` and return its tasks. A source of documents is one task.

    Raises: DataError when the source does not take these parameters.
    """
    try:
        inspect.signature(source).bind(**parameters)
    except TypeError as error:
        known = ", ".join(inspect.signature(source).parameters) or "none"
        raise DataError(
            f"The source {name!r} cannot be called: {error}.", fix=f"Its parameters are: {known}."
        ) from error
    if not inspect.isgeneratorfunction(source):
        tasks = source(**parameters)
        if isinstance(tasks, (list, tuple)) and all(isinstance(task, ReadTask) for task in tasks):
            return list(tasks)
    return [
        ReadTask(_call, (source, parameters), fingerprint=f"{name} {sorted(parameters.items())}")
    ]


def _call(source: Source, parameters: JsonObject) -> Iterable[Row | str]:
    return source(**parameters)  # type: ignore[return-value]  # not a list of tasks: read_tasks_of checked


def line_number(name: str, offset: int) -> int:
    """Return the number, from 1, of the line that starts at byte `offset` of a file."""
    lines = 1
    with open_bytes(name) as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines
