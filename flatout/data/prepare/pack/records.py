"""Records of packed ranges: `NNNNNN.json`, written last, so a range with a record is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from flatout.data.prepare.pack.skipped import SkippedRows, StoredLocation
from flatout.data.store.manifest import FileEntry, SplitName
from flatout.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]

RECORD = ".json"
MARK = np.dtype([("hash", "<u8", 2), ("text_bytes", "<i8")])
"""A document's mark, which identifies duplicates: half the SHA-256 of its prompt's length, prompt
and text; and the bytes of its text.
"""
_DTYPES = {"ends": np.dtype("<i8"), "marks": MARK}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RangeSplit(_Record):
    """The contents of one split in a range."""

    tokens: int = Field(0, ge=0)
    documents: int = Field(0, ge=0)
    text_bytes: int = Field(0, ge=0)
    """UTF-8 bytes of the documents' text."""
    files: dict[str, FileEntry] = {}
    """Its files by kind: bin, ends, and mask or marks when requested; empty without tokens."""

    def read(self, folder: Path, kind: Literal["ends", "marks"]) -> Array:
        """Return the end of each document, in tokens from the range's start, or the marks.

        Shapes:  returns (documents,).
        """
        if kind not in self.files:
            return np.empty(0, _DTYPES[kind])
        return np.fromfile(folder / self.files[kind].name, _DTYPES[kind])


class RangeRecord(_Record):
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
    """Return the records in a folder by their numbers.

    Raises: DataError when one is damaged, or was written by another version of flatout.
    """
    return {record.number: record for record in map(_read, folder.glob(f"*{RECORD}"))}


def _read(path: Path) -> RangeRecord:
    try:
        return RangeRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path} is damaged or was not written by this version of flatout.",
            fix=f"Remove the directory {path.parent.parent} to start over.",
        ) from error
