"""Records of packed ranges: `NNNNNN.json`, written last, so a range with a record is complete.

Rows that are left out are counted by reason, with the locations of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote, unquote

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer

from flatout.data.prepare.request.options import OnBadRow
from flatout.data.store.manifest import FileEntry, SkippedEntry, SplitName
from flatout.errors import DataError, TooLittleText, without_secrets
from flatout.files import Array, StoredModel
from flatout.sources import FIRST_NAMED, BadRow, RowLocation


def _to_json(location: RowLocation) -> tuple[str, int | None]:
    """Return a location as JSON values, even if the file name is not UTF-8."""
    return quote(
        without_secrets(location.name), safe="/:, ", errors="surrogateescape"
    ), location.offset


def _from_json(stored: Any) -> Any:
    if isinstance(stored, RowLocation):
        return stored
    return RowLocation(unquote(stored[0], errors="surrogateescape"), stored[1])


StoredLocation = Annotated[RowLocation, BeforeValidator(_from_json), PlainSerializer(_to_json)]
"""A row's location by byte offset; its line number is looked up only to show it to a user."""


@dataclass
class SkippedRows:
    """Rows left out for one reason."""

    reason: str
    count: int = 0
    first: tuple[StoredLocation, ...] = ()
    """Locations of the first of them."""


@dataclass
class Skipped:
    """All rows left out."""

    rows: dict[str, SkippedRows] = field(default_factory=dict)
    """By reason."""
    bad: int = 0
    """Number of bad rows among them; a source left out the others by its own rule."""
    first_bad: BadRow | None = None
    unread_bytes: int = 0
    """Approximate bytes of text lost with rows that stand for damaged data."""
    cut_documents: int = 0
    """Documents cut where validation begins: not left out, but counted once in each split."""

    def add(self, reason: str, locations: Sequence[RowLocation], count: int = 1) -> None:
        """Count rows; `locations` are those of the first."""
        rows = self.rows.setdefault(reason, SkippedRows(reason))
        rows.count += count
        if len(rows.first) < FIRST_NAMED:
            rows.first = (*rows.first, *locations)[:FIRST_NAMED]

    def add_bad(self, row: BadRow, on_bad_row: OnBadRow) -> None:
        """Count a bad row, or raise its error."""
        if on_bad_row == "raise":
            raise row.error
        self.bad += 1
        self.first_bad = self.first_bad or row
        self.unread_bytes += row.unread_bytes
        self.add(row.reason, [row.location])

    def entries(self) -> tuple[SkippedEntry, ...]:
        """Return the manifest's entries; files are read again to name rows by line."""
        return tuple(
            SkippedEntry(
                reason=rows.reason,
                count=rows.count,
                first=tuple(storable(location.where()) for location in rows.first),
            )
            for rows in self.rows.values()
        )


def storable(name: str) -> str:
    """Return a name as valid UTF-8, and a URL without its secrets."""
    return without_secrets(
        name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
    )


def no_documents(names: str, skipped: Iterable[SkippedRows] = ()) -> TooLittleText:
    """Return the error for a corpus without a document."""
    reasons = ", ".join(f"{rows.count:,} {rows.reason}" for rows in skipped)
    return TooLittleText(
        f"{names} contains no documents{f' ({reasons})' if reasons else ''}.",
        fix="Name a file or directory with text in it.",
    )


Stored = TypeVar("Stored", bound=StoredModel)

RECORD = ".json"
MARK = np.dtype([("hash", "<u8", 2), ("text_bytes", "<i8")])
"""A document's mark, which identifies duplicates: half the SHA-256 of its prompt's length, prompt
and text; and the bytes of its text.
"""
_DTYPES = {"ends": np.dtype("<i8"), "marks": MARK}


class RangeSplit(StoredModel):
    """The contents of one split in a range."""

    tokens: int = Field(0, ge=0)
    documents: int = Field(0, ge=0)
    text_bytes: int = Field(0, ge=0)
    """UTF-8 bytes of the documents' text."""
    files: dict[str, FileEntry] = Field(default_factory=dict)
    """Its files by kind: bin, ends, and mask or marks when requested; empty without tokens."""

    def read(self, folder: Path, kind: Literal["ends", "marks"]) -> Array:
        """Return the end of each document, in tokens from the range's start, or the marks.

        Shapes:  returns (documents,).
        """
        if kind not in self.files:
            return np.empty(0, _DTYPES[kind])
        return np.fromfile(folder / self.files[kind].name, _DTYPES[kind])


class RangeRecord(StoredModel):
    """The record of a packed range."""

    number: int = Field(ge=0)
    """Its index among the ranges."""
    num_bytes: int = Field(ge=0)
    """Approximate bytes that were read."""
    splits: dict[SplitName, RangeSplit]
    """train and val."""
    skipped: tuple[SkippedRows, ...] = ()
    """Rows left out."""
    bad_rows: int = Field(0, ge=0)
    """Number of these that were bad, rather than left out by a rule."""
    first_bad: tuple[StoredLocation, str] | None = None
    """Location of the first bad row, and its error."""
    unread_bytes: int = Field(0, ge=0)
    """Approximate bytes, out of num_bytes, lost to damage."""
    cut_documents: int = Field(0, ge=0)
    """Documents cut where validation begins; both splits count them."""

    @property
    def documents(self) -> int:
        """Documents of both splits; a cut one counts once."""
        return sum(split.documents for split in self.splits.values()) - self.cut_documents

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return sum(split.tokens for split in self.splits.values())

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text of both splits."""
        return sum(split.text_bytes for split in self.splits.values())


def record_path(folder: Path, number: int) -> Path:
    """Return the path of a range's record."""
    return folder / f"{number:06d}{RECORD}"


def read_records(folder: Path) -> dict[int, RangeRecord]:
    """Return the records in a directory by their numbers.

    Raises: DataError when one is damaged, or was written by another version of flatout.
    """
    records = (
        read_stored(path, RangeRecord, work_dir=folder.parent) for path in folder.glob(f"*{RECORD}")
    )
    return {record.number: record for record in records}


def read_stored(path: Path, model: type[Stored], *, work_dir: Path) -> Stored:
    """Return the JSON in a file of the work directory as a `model`.

    Raises: DataError when it is damaged, or was written by another version of flatout.
    """
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged or was not written by this version of flatout.",
            fix=f"Remove the directory {work_dir} to start over.",
        ) from error
