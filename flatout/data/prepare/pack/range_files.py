"""The files of a range: `NNNNNN.{train,val}.{bin,ends,mask}`, and its record, `NNNNNN.json`.

They contain the tokens, the position after each document's last token (from the range's start) and
the loss mask. The record is written last, so a range with a record is complete. It counts rows that
are omitted by reason, with the locations of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import ConfigDict, Field

from flatout.data.prepare.request.options import OnBadRow
from flatout.data.sources import FIRST_NAMED, BadRow
from flatout.data.store.manifest import (
    SPLITS,
    FileEntry,
    SkippedRows,
    SplitName,
    StoredLocation,
    storable,
    token_dtype,
)
from flatout.errors import DataError, TooLittleText
from flatout.storage.files import Array, CheckedFile, Stored, sync, write_whole, writing

MOST_REASONS = 30
"""Reasons after which similar ones are counted together: a template's sentence may quote its row.
"""


def count_skipped(
    skipped: list[SkippedRows], reason: str, locations: Sequence[StoredLocation], count: int = 1
) -> None:
    """Count rows in `skipped`, which has one entry per reason. `locations` are of the first.

    Once there are MOST_REASONS, the part of a reason after a colon no longer counts.
    """
    if len(skipped) >= MOST_REASONS and all(rows.reason != reason for rows in skipped):
        reason = reason.partition(":")[0]
    for rows in skipped:
        if rows.reason == reason:
            rows.count += count
            if len(rows.first) < FIRST_NAMED:
                rows.first = (*rows.first, *locations)[:FIRST_NAMED]
            return
    skipped.append(SkippedRows(reason=reason, count=count, first=tuple(locations)[:FIRST_NAMED]))


def no_documents(names: str, skipped: Iterable[SkippedRows] = ()) -> TooLittleText:
    """Return the error for a corpus without a document."""
    reasons = ", ".join(f"{rows.count:,} {rows.reason}" for rows in skipped)
    return TooLittleText(
        f"{names} contains no documents{f' ({reasons})' if reasons else ''}.",
        fix="Name a file or directory with text in it.",
    )


Document = TypeVar("Document", bound=Stored)

RECORD = ".json"


class RangeSplit(Stored):
    """The contents of one split in a range."""

    tokens: int = Field(0, ge=0)
    documents: int = Field(0, ge=0)
    text_bytes: int = Field(0, ge=0)
    """UTF-8 bytes of the documents' text."""
    files: dict[str, FileEntry] = Field(default_factory=dict)
    """Its files by kind: bin, ends, and mask when requested. Empty without tokens."""

    def ends(self, folder: Path) -> Array:
        """Return the end of each document, in tokens from the range's start.

        Shapes:  returns (documents,).
        """
        if "ends" not in self.files:
            return np.empty(0, "<i8")
        return np.fromfile(folder / self.files["ends"].name, "<i8")


class RangeRecord(Stored):
    """The record of a packed range. It is filled while the range is packed."""

    model_config = ConfigDict(frozen=False)

    number: int = Field(ge=0)
    """Its index among the ranges."""
    num_bytes: int = Field(ge=0)
    """Approximate bytes that were read."""
    splits: dict[SplitName, RangeSplit] = Field(default_factory=dict)
    """train and val."""
    skipped: list[SkippedRows] = Field(default_factory=list)
    """Rows omitted."""
    bad_rows: int = Field(0, ge=0)
    """Number of these that were bad, rather than omitted by a rule."""
    first_bad: tuple[StoredLocation, str] | None = None
    """Location of the first bad row, and its error."""
    unread_bytes: int = Field(0, ge=0)
    """Approximate bytes, out of num_bytes, lost to damage."""
    cut_documents: int = Field(0, ge=0)
    """Documents cut where validation begins. Both splits count them."""

    def skip_bad(self, row: BadRow, on_bad_row: OnBadRow) -> None:
        """Count a bad row, or raise its error."""
        if on_bad_row == "raise":
            raise row.error
        self.bad_rows += 1
        self.first_bad = self.first_bad or (row.location, storable(row.what))
        self.unread_bytes += row.unread_bytes
        count_skipped(self.skipped, row.reason, [row.location])

    @property
    def documents(self) -> int:
        """Documents of both splits. A cut one counts once."""
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

    Raises: DataError when one is damaged, or was written by a different version of flatout.
    """
    records = (
        read_stored(path, RangeRecord, work_dir=folder.parent) for path in folder.glob(f"*{RECORD}")
    )
    return {record.number: record for record in records}


def read_stored(path: Path, model: type[Document], *, work_dir: Path) -> Document:
    """Return the JSON in a file of the work directory as a `model`.

    Raises: DataError when it is damaged, or was written by a different version of flatout.
    """
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged or was not written by this version of flatout.",
            fix=f"Remove the directory {work_dir} to start over.",
        ) from error


class SplitWriter:
    """Writes the files of one split of a range. A file is created when it has content."""

    def __init__(self, folder: Path, stem: str, vocab_size: int) -> None:
        self._folder = folder
        self._stem = stem
        self._vocab_size = vocab_size
        self._dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._files: dict[str, CheckedFile] = {}
        self._tokens = self._documents = self._text_bytes = self._last_end = 0

    def append(
        self,
        tokens: Array,
        ends: Array | Sequence[int],
        *,
        text_bytes: int,
        mask: Array | None = None,
    ) -> None:
        """Append tokens. `ends` are the positions in `tokens` after each document's last token.

        A document may continue in the next call. `mask` is 0 where a token is not a target. Either
        every call for a split has a mask, or none does.

        Shapes:  tokens (T,), any integer type; ends (documents,), ascending, at most T; mask (T,).
        Raises: DataError for an id outside the vocabulary.
        """
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise DataError(
                f"The tokenizer returned ids from {int(tokens.min())} to {int(tokens.max())}, but "
                f"states a vocabulary of {self._vocab_size}.",
                fix="Correct the tokenizer's vocab_size.",
            )
        ends = np.asarray(ends, np.int64) + self._tokens
        with writing(self._folder.parent):
            self._write("bin", tokens.astype(self._dtype))
            self._write("ends", ends.astype("<i8"))
            if mask is not None:
                self._write("mask", (mask != 0).astype(np.uint8))
        self._tokens += len(tokens)
        self._documents += len(ends)
        self._text_bytes += text_bytes
        self._last_end = int(ends[-1]) if len(ends) else self._last_end

    def _write(self, kind: str, items: Array) -> None:
        if len(items):
            if kind not in self._files:
                self._files[kind] = CheckedFile(self._folder / f"{self._stem}.{kind}")
            self._files[kind].write(items)

    def finish(self) -> RangeSplit:
        """Sync and rename the files. Tokens after the last end form one more document."""
        if self._last_end < self._tokens:
            self._write("ends", np.array([self._tokens], "<i8"))
            self._last_end = self._tokens
            self._documents += 1
        files = {kind: file.close() for kind, file in self._files.items()}
        return RangeSplit(
            tokens=self._tokens, documents=self._documents, text_bytes=self._text_bytes, files=files
        )

    def abandon(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            file.abandon()


class RangeWriter:
    """Writes a range's files. `finish` records them."""

    def __init__(self, folder: Path, number: int, *, vocab_size: int, num_bytes: int = 0) -> None:
        self._folder = folder
        self.record = RangeRecord(number=number, num_bytes=num_bytes)
        """Counts the rows omitted, and receives the splits at the end."""
        self.splits = {
            name: SplitWriter(folder, f"{number:06d}.{name}", vocab_size) for name in SPLITS
        }

    def finish(self) -> RangeRecord:
        """Sync and rename the files, then write the record, and return it."""
        record = self.record
        try:
            with writing(self._folder.parent):
                record.splits = {name: split.finish() for name, split in self.splits.items()}
                # After a power cut there must be no record without its files. Files without a
                # record only cost packing the range again.
                sync(self._folder)
                path = record_path(self._folder, record.number)
                write_whole(path, record.model_dump_json() + "\n")
        except BaseException:
            self.abandon()
            raise
        return record

    def abandon(self) -> None:
        """Remove what was written."""
        for split in self.splits.values():
            split.abandon()
