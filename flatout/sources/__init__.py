"""Where text comes from: one file a source.

A source is a function of keyword parameters, held by its file as `SOURCE`. It either yields
documents (or plain strings), or returns a list of `ReadTask`s, so that several processes can read it.
Parts come in a fixed order, and a part read twice yields the same documents: the order of documents
is part of a data set.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flatout.errors import DataError, without_secrets
from flatout.sources.long import Text
from flatout.sources.originals import Original
from flatout.sources.packed import open_bytes
from flatout.transfer.urls import is_url

FIRST_NAMED = 10
"""Of the rows left out for one reason, so many are named."""


@dataclass(frozen=True, slots=True)
class RowLocation:
    """Where a row is. To name it by its line its file is read again: only where a person is told."""

    name: str
    """The file, or whatever names the row in a message."""
    offset: int | None = None
    """First byte of the row, when it is one row of the file `name`."""

    def where(self) -> str:
        """Return the location for a message; a row is named by its line."""
        return self.name if self.offset is None else row_location(self.name, self.offset)


@dataclass(frozen=True, slots=True)
class Document:
    """One text, and where it is from."""

    text: Text
    name: str
    """The file, or whatever names the document in a message."""
    offset: int | None = None
    """First byte of the row, when the document is one row of the file `name`."""
    prompt: str = ""
    """What comes before the text and is not learned from."""

    @property
    def location(self) -> RowLocation:
        """Where it is."""
        return RowLocation(self.name, self.offset)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that should have been a document; `prepare --on-bad-row` says whether it raises or is
    skipped and counted.
    """

    what: str
    """What is wrong with it, as a sentence goes on that begins with where it is: `is not JSON`."""
    fix: str
    """What to do about it."""
    reason: str
    """A few words under which such rows are counted."""
    name: str
    """The file, or whatever names the row in a message."""
    offset: int | None = None
    """First byte of the row, when it is one row of the file `name`."""
    unread_bytes: int = 0
    """About how much text is lost with it, of that which its part holds: where it stands for the
    rest of something that is damaged.
    """

    @classmethod
    def of(
        cls,
        error: DataError,
        reason: str,
        name: str,
        offset: int | None = None,
        *,
        unread_bytes: int = 0,
    ) -> Self:
        """Return the bad row for an error that begins with `name`."""
        what = error.what.removeprefix(without_secrets(name)).strip().removesuffix(".")
        return cls(what, error.fix, reason, name, offset, unread_bytes)

    @property
    def location(self) -> RowLocation:
        """Where it is."""
        return RowLocation(self.name, self.offset)

    @property
    def error(self) -> DataError:
        """What to raise."""
        return DataError(f"{self.location.where()} {self.what}.", fix=self.fix)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A document that a source leaves out by its own rule: counted, never an error."""

    reason: str
    name: str
    """The file, or whatever names the document in a message."""
    offset: int | None = None
    """First byte of the row, when the document is one row of the file `name`."""
    count: int = 1
    """How many like it are left out with it, itself included."""

    @property
    def location(self) -> RowLocation:
        """Where it is."""
        return RowLocation(self.name, self.offset)


Row = Document | BadRow | LeftOut


@dataclass(frozen=True)
class ReadTask:
    """The part of a source that one process reads; it is pickled, so `read` is a module's function."""

    read: Callable[..., Iterable[Row | str]]
    arguments: tuple[Any, ...]
    fingerprint: str
    """Changes when the documents change; empty when an earlier task's fingerprint covers them."""
    num_bytes: int = 0
    """Approximate bytes to read; 0 when unknown."""
    originals: tuple[Original, ...] = ()
    """The files that the fingerprint covers, as they were when listed."""

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order; a document without text becomes a `LeftOut`."""
        for index, row in enumerate(self.read(*self.arguments)):
            document = Document(row, f"document {index}") if isinstance(row, str) else row
            if isinstance(document, Document) and not document.text:
                yield LeftOut("empty document", document.name, document.offset)
            else:
                yield document


Source = Callable[..., Sequence[ReadTask] | Iterable[Row | str]]


def read_tasks_of(source: Source, name: str, parameters: dict[str, Any]) -> list[ReadTask]:
    """Return the parts of a source called with `parameters`; one that yields documents is a single
    part.

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
        made = source(**parameters)
        if isinstance(made, (list, tuple)) and all(isinstance(part, ReadTask) for part in made):
            return list(made)
    return [
        ReadTask(_call, (source, parameters), fingerprint=f"{name} {sorted(parameters.items())}")
    ]


def _call(source: Source, parameters: dict[str, Any]) -> Iterable[Row | str]:
    return source(**parameters)  # type: ignore[return-value]  # not a list of parts: read_tasks_of looked


def row_location(name: str, offset: int) -> str:
    """Return `FILE, line N` for the row that begins at byte `offset`; `FILE, byte N` where the file
    is remote or gone.
    """
    try:
        return (
            f"{name}, byte {offset}"
            if is_url(name)
            else f"{name}, line {line_number(name, offset)}"
        )
    except (OSError, EOFError, zlib.error):
        return f"{name}, byte {offset}"


def line_number(name: str, offset: int) -> int:
    """Return the number of the line that begins at byte `offset` of a file, counted from 1."""
    lines = 1
    with open_bytes(name) as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines
