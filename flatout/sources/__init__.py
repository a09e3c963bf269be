"""Where text comes from: one file a source.

A source is a function of keyword parameters, held by its file as `SOURCE`. It either yields documents (or plain strings), or
returns a list of `Part`s, so that several processes can read it. Parts come in a fixed order, and a part read twice yields
the same documents: the order of documents is part of a data set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.errors import DataError
from flatout.sources.long import Text
from flatout.sources.packed import open_bytes
from flatout.sources.remote import is_address

FIRST_NAMED = 10
"""Of the rows left out for one reason, so many are named."""


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

    def where(self) -> str:
        """Return the place as a person looks it up; a row is named by its line."""
        return self.name if self.offset is None else row_place(self.name, self.offset)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that should have been a document; `prepare --on-bad-row` says whether it raises or is skipped and counted."""

    error: DataError
    reason: str
    """A few words under which such rows are counted."""
    name: str
    """Where it is."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A document that a source leaves out by its own rule: counted, never an error."""

    reason: str
    name: str


Row = Document | BadRow | LeftOut


@dataclass(frozen=True)
class Part:
    """A piece of a source that one process reads alone; it travels to that process, so `read` is a module's function."""

    read: Callable[..., Iterable[Row | str]]
    arguments: tuple[Any, ...]
    fingerprint: str
    """Changes when the documents change; empty when an earlier part speaks for this one too."""
    num_bytes: int = 0
    """About how much there is to read; 0 when that is not known."""

    def rows(self) -> Iterator[Row]:
        """Yield what the part holds, in order; empty documents are left out."""
        empty = 0
        for index, row in enumerate(self.read(*self.arguments)):
            document = Document(row, f"document {index}") if isinstance(row, str) else row
            if isinstance(document, Document) and not document.text:
                empty += 1
                yield LeftOut("empty document", document.where() if empty <= FIRST_NAMED else document.name)
            else:
                yield document


Source = Callable[..., Sequence[Part] | Iterable[Row | str]]


def parts_of(source: Source, name: str, parameters: dict[str, Any]) -> list[Part]:
    """Return the parts of a source called with `parameters`; one that yields documents is a single part.

    Raises: DataError when the source does not take these parameters.
    """
    try:
        inspect.signature(source).bind(**parameters)
    except TypeError as error:
        known = ", ".join(inspect.signature(source).parameters) or "none"
        raise DataError(f"The source {name!r} cannot be called: {error}.", fix=f"Its parameters are: {known}.") from error
    if not inspect.isgeneratorfunction(source):
        made = source(**parameters)
        if isinstance(made, (list, tuple)) and all(isinstance(part, Part) for part in made):
            return list(made)
    return [Part(_call, (source, parameters), fingerprint=f"{name} {sorted(parameters.items())}")]


def _call(source: Source, parameters: dict[str, Any]) -> Iterable[Row | str]:
    return source(**parameters)  # type: ignore[return-value]  # not a list of parts: parts_of looked


def row_place(name: str, offset: int) -> str:
    """Return `FILE, line N` for the row that begins at byte `offset`; of a remote file, which is not read again for it, `FILE, byte N`."""
    return f"{name}, byte {offset}" if is_address(name) else f"{name}, line {line_number(name, offset)}"


def line_number(name: str, offset: int) -> int:
    """Return the number of the line that begins at byte `offset` of a file, counted from 1."""
    lines = 1
    with open_bytes(name) as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines
