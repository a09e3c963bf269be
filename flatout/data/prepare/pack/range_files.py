"""A packed range: a shard of the dataset, in its final format, and its record, `NNNNNN.json`.

The record is written last, so a range with a record is complete. It counts rows that are omitted by
reason, with the locations of the first.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import TypeVar

import numpy as np
from pydantic import ConfigDict, Field

from flatout.data.prepare.request.options import OnBadRow
from flatout.data.sources import FIRST_NAMED, BadRow
from flatout.data.store.manifest import (
    SPLITS,
    Counted,
    ShardEntry,
    SkippedRows,
    SplitCounts,
    SplitName,
    StoredLocation,
    storable,
    token_dtype,
)
from flatout.errors import DataError, TooLittleText
from flatout.storage.files import Array, CheckedFile, Stored, writing

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
RANGES, DATASET = "ranges", "dataset"
"""Directories of a work directory: records of ranges, and their shards."""
HELD_BYTES = 8 << 20
"""Bytes of val in memory per file of a shard."""
COPIED_BYTES = 1 << 20


class RangeRecord(Counted):
    """The record of a packed range. It is filled while the range is packed."""

    model_config = ConfigDict(frozen=False)

    number: int = Field(ge=0)
    """Its index among the ranges."""
    num_bytes: int = Field(ge=0)
    """Approximate bytes that were read."""
    skipped: list[SkippedRows] = Field(default_factory=list)
    """Rows omitted."""
    bad_rows: int = Field(0, ge=0)
    """Number of these that were bad, rather than omitted by a rule."""
    first_bad: tuple[StoredLocation, str] | None = None
    """Location of the first bad row, and its error."""
    unread_bytes: int = Field(0, ge=0)
    """Approximate bytes, out of num_bytes, lost to damage."""

    def skip_bad(self, row: BadRow, on_bad_row: OnBadRow) -> None:
        """Count a bad row with those that it represents, or raise its error."""
        if on_bad_row == "raise":
            raise row.error
        self.bad_rows += row.count
        self.first_bad = self.first_bad or (row.location, storable(row.what))
        self.unread_bytes += row.unread_bytes
        count_skipped(self.skipped, row.reason, [row.location], row.count)


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


class ShardWriter:
    """Writes a shard: the tokens of train as they come, those of val after them at the end.

    Until then, val is in memory, and from HELD_BYTES on in a file without a name.
    """

    def __init__(self, folder: Path, number: int, vocab_size: int) -> None:
        self._folder = folder
        self._number = number
        self._vocab_size = vocab_size
        dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._dtypes = {"": dtype, ".ends": np.dtype("<i8"), ".mask": np.dtype(np.uint8)}
        self._files: dict[str, CheckedFile] = {}
        self._held: dict[str, SpooledTemporaryFile[bytes]] = {}
        self.counts = dict.fromkeys(SPLITS, SplitCounts())
        """What was written of each split."""
        self._crcs = Counter[tuple[SplitName, str]]()

    def append(
        self,
        split: SplitName,
        tokens: Array,
        ends: Array | Sequence[int],
        *,
        text_bytes: int,
        mask: Array | None = None,
    ) -> None:
        """Append tokens. `ends` are the positions in `tokens` after each document's last token.

        A document may continue in the next call. `mask` is 0 where a token is not a target. Either
        every call has a mask, or none does.

        Shapes:  tokens (T,), any integer type; ends (documents,), ascending, at most T; mask (T,).
        Raises: DataError for an id outside the vocabulary.
        """
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise DataError(
                f"The tokenizer returned ids from {int(tokens.min())} to {int(tokens.max())}, but "
                f"states a vocabulary of {self._vocab_size}.",
                fix="Correct the tokenizer's vocab_size.",
            )
        before = self.counts[split]
        items = {"": tokens, ".ends": np.asarray(ends, np.int64) + before.tokens}
        if mask is not None:
            items[".mask"] = mask != 0
        with writing(self._folder.parent):
            for kind, values in items.items():
                stored = np.ascontiguousarray(values, self._dtypes[kind])
                self._crcs[split, kind] = zlib.crc32(stored.data, self._crcs[split, kind])
                if split == "train":
                    self._file(kind).write(stored)
                else:
                    self._spool(kind).write(stored.data)
        self.counts[split] = before + SplitCounts(
            tokens=len(tokens), documents=len(ends), text_bytes=text_bytes
        )

    @property
    def is_masked(self) -> bool:
        """Whether tokens had a mask."""
        return ".mask" in self._files or ".mask" in self._held

    def _file(self, kind: str) -> CheckedFile:
        if kind not in self._files:
            path = self._folder / f"{self._number:05d}{kind}.bin"
            self._files[kind] = CheckedFile(path)
        return self._files[kind]

    def _spool(self, kind: str) -> SpooledTemporaryFile[bytes]:
        if kind not in self._held:
            self._held[kind] = SpooledTemporaryFile(  # noqa: SIM115 -- closed by finish and abandon
                HELD_BYTES, dir=str(self._folder)
            )
        return self._held[kind]

    def finish(self) -> tuple[ShardEntry, ...]:
        """Sync and rename the files, and return their entry, if there are tokens."""
        for kind, held in self._held.items():
            file = self._file(kind)
            held.seek(0)
            while block := held.read(COPIED_BYTES):
                file.write(np.frombuffer(block, np.uint8))
            held.close()
        entries = {kind: file.close() for kind, file in self._files.items()}
        if not entries:
            return ()
        shard = ShardEntry(
            tokens=entries[""],
            ends=entries[".ends"],
            mask=entries.get(".mask"),
            splits=dict(self.counts),
            crc32={
                split: tuple(self._crcs[split, kind] for kind in self._dtypes) for split in SPLITS
            },
        )
        return (shard,)

    def abandon(self) -> None:
        """Remove the files."""
        for held in self._held.values():
            held.close()
        for file in self._files.values():
            file.abandon()
