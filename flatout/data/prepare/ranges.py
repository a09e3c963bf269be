"""Ranges: the pieces the work is split into, each packed by one process into files of its own and
recorded when they are whole.

A range's files are `NNNNNN.{train,val}.{bin,ends,mask,marks}`: tokens, the positions after each
document's last token counted from the range's first, the loss mask, and what duplicates are found
by. Its record, `NNNNNN.json`, comes last: a range that has one is done for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, unquote

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from flatout.data.prepare.tokenize import Job, Packing, Skipped, Tell, pack, storable
from flatout.data.store.manifest import SPLITS, FileEntry, SplitName, token_dtype
from flatout.errors import DataError, without_secrets
from flatout.files import CheckedFile, sync, write_whole, writing
from flatout.sources import RowLocation

Array = np.ndarray[Any, np.dtype[Any]]

RANGE_BYTES = 8 << 20
"""About how much there is to read in one range: little is lost when it is interrupted, and many
cores share the work evenly.
"""

RECORD = ".json"


@dataclass(frozen=True)
class Range:
    """Consecutive jobs that one process packs in one go."""

    number: int
    jobs: tuple[Job, ...]

    @property
    def num_bytes(self) -> int:
        """About how much there is to read; 0 when that is not known."""
        return sum(job.part.num_bytes for job in self.jobs)


def make_ranges(jobs: Sequence[Job]) -> list[Range]:
    """Return the jobs in ranges of about `RANGE_BYTES`; one whose size is not known is a range of
    its own.
    """
    groups: list[list[Job]] = []
    room = 0
    for job in jobs:
        size = job.part.num_bytes or RANGE_BYTES
        if not groups or size > room:
            groups.append([])
            room = RANGE_BYTES
        groups[-1].append(job)
        room -= size
    return [Range(number, tuple(group)) for number, group in enumerate(groups)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RangeSplit(_Record):
    """What a range holds of one split."""

    tokens: int = Field(0, ge=0)
    """Tokens."""
    documents: int = Field(0, ge=0)
    """Documents."""
    text_bytes: int = Field(0, ge=0)
    """UTF-8 bytes of their text."""
    files: dict[str, FileEntry] = {}
    """Its files by kind: bin and ends, and mask or marks where they were asked for; none when there
    are no tokens.
    """


def _stored(place: RowLocation) -> tuple[str, int | None]:
    """Return a place as JSON can hold it, also where the file's name is not UTF-8."""
    return quote(without_secrets(place.name), safe="/:, ", errors="surrogateescape"), place.offset


def _restored(stored: Any) -> Any:
    return (
        stored
        if isinstance(stored, RowLocation)
        else RowLocation(unquote(stored[0], errors="surrogateescape"), stored[1])
    )


StoredPlace = Annotated[RowLocation, BeforeValidator(_restored), PlainSerializer(_stored)]
"""Where a row is. Its line is looked up for the few that are told of, not for every range's first.
"""


class SkippedRows(_Record):
    """Rows of a range that were left out for one reason."""

    reason: str
    """Why."""
    count: int = Field(ge=1)
    """How many."""
    first: tuple[StoredPlace, ...] = ()
    """Where the first of them are."""


class RangeRecord(_Record):
    """A range that is done."""

    number: int = Field(ge=0)
    """Its place among the ranges."""
    num_bytes: int = Field(ge=0)
    """About how much there was to read."""
    splits: dict[SplitName, RangeSplit]
    """train and val."""
    skipped: tuple[SkippedRows, ...] = ()
    """Rows left out."""
    bad_rows: int = Field(0, ge=0)
    """How many of them were bad, not left out by a rule."""
    first_bad: tuple[StoredPlace, str] | None = None
    """Where the first of those is, and what is wrong with it."""
    unread_bytes: int = Field(0, ge=0)
    """About how much text was lost in what is damaged, out of num_bytes."""
    cut_documents: int = Field(0, ge=0)
    """Documents that were cut where validation begins; both splits count them."""

    @property
    def documents(self) -> int:
        """Documents of both splits; one that was cut is one."""
        return sum(split.documents for split in self.splits.values()) - self.cut_documents

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return sum(split.tokens for split in self.splits.values())

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text of both splits."""
        return sum(split.text_bytes for split in self.splits.values())


class RangeWriter:
    """A range's files being written; nothing is recorded before `finish`."""

    def __init__(self, folder: Path, number: int, *, vocab_size: int, num_bytes: int = 0) -> None:
        self._folder = folder
        self._number = number
        self._num_bytes = num_bytes
        self._splits = {
            name: _SplitFiles(folder, f"{number:06d}.{name}", vocab_size) for name in SPLITS
        }

    def append(
        self,
        split: SplitName,
        tokens: Array,
        ends: Array | Sequence[int],
        *,
        text_bytes: int,
        mask: Array | None = None,
        marks: Array | None = None,
    ) -> None:
        """Append tokens of a split; `ends` are the positions in `tokens` after each document's last
        token.

        A document may go on in the next call. `mask` is 0 where a token is no target; a split has
        it always or never.

        Shapes:  tokens (T,), any integer type; ends (documents,), ascending, at most T; mask (T,);
                 marks (documents,) of MARK.
        Raises: DataError for an id the vocabulary does not have.
        """
        with writing(self._folder.parent):
            self._splits[split].append(tokens, np.asarray(ends, np.int64), text_bytes, mask)
            if marks is not None:
                self._splits[split].write("marks", marks)

    def finish(self, skipped: Skipped | None = None) -> RangeRecord:
        """Sync and rename the files, then write the record, and return it; tokens after the last
        end are one more document.
        """
        try:
            with writing(self._folder.parent):
                splits = {name: split.finish() for name, split in self._splits.items()}
                record = self._record(splits, skipped or Skipped())
                sync(
                    self._folder
                )  # before the record: one that outlives a power cut finds its files, one that does not costs the range again
                write_whole(
                    record_path(self._folder, self._number), record.model_dump_json() + "\n"
                )
        except BaseException:
            self.abandon()
            raise
        return record

    def _record(self, splits: dict[SplitName, RangeSplit], skipped: Skipped) -> RangeRecord:
        return RangeRecord(
            number=self._number,
            num_bytes=self._num_bytes,
            splits=splits,
            skipped=tuple(
                SkippedRows(reason=reason, count=count, first=tuple(skipped.first[reason]))
                for reason, count in skipped.counts.items()
            ),
            bad_rows=skipped.bad,
            first_bad=(first.location, storable(first.what))
            if (first := skipped.first_bad) is not None
            else None,
            unread_bytes=skipped.unread_bytes,
            cut_documents=skipped.cut_documents,
        )

    def abandon(self) -> None:
        """Remove what was written."""
        for split in self._splits.values():
            split.abandon()


class _SplitFiles:
    """The files of one split of a range, made when there is something to write to them."""

    def __init__(self, folder: Path, stem: str, vocab_size: int) -> None:
        self._folder = folder
        self._stem = stem
        self._vocab_size = vocab_size
        self._dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._files: dict[str, CheckedFile] = {}
        self._tokens = self._documents = self._text_bytes = self._last_end = 0

    def append(self, tokens: Array, ends: Array, text_bytes: int, mask: Array | None) -> None:
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise DataError(
                f"The tokenizer gave the ids {int(tokens.min())} to {int(tokens.max())}, but says its vocabulary has {self._vocab_size}.",
                fix="Repair the tokenizer's vocab_size.",
            )
        assert not self._tokens or ("mask" in self._files) == (mask is not None), (
            "a split has a mask always or never"
        )
        assert mask is None or len(mask) == len(tokens)
        ends = ends + self._tokens
        steps = np.diff(ends, prepend=self._last_end)
        assert not len(steps) or (steps.min() > 0 and ends[-1] <= self._tokens + len(tokens)), (
            "document ends must ascend within the tokens"
        )
        self.write("bin", tokens.astype(self._dtype))
        self.write("ends", ends.astype("<i8"))
        if mask is not None:
            self.write("mask", (mask != 0).astype(np.uint8))
        self._tokens += len(tokens)
        self._documents += len(ends)
        self._text_bytes += text_bytes
        self._last_end = int(ends[-1]) if len(ends) else self._last_end

    def write(self, kind: str, items: Array) -> None:
        if len(items):
            if kind not in self._files:
                self._files[kind] = CheckedFile(self._folder / f"{self._stem}.{kind}")
            self._files[kind].write(items)

    def finish(self) -> RangeSplit:
        if self._last_end < self._tokens:
            self.write("ends", np.array([self._tokens], "<i8"))
            self._last_end = self._tokens
            self._documents += 1
        files = {kind: file.close() for kind, file in self._files.items()}
        return RangeSplit(
            tokens=self._tokens, documents=self._documents, text_bytes=self._text_bytes, files=files
        )

    def abandon(self) -> None:
        for file in self._files.values():
            file.abandon()


def pack_range(
    work: Range, packing: Packing, folder: Path, tell: Tell
) -> Callable[[], RangeRecord]:
    """Pack a range into its files in the folder, and return what syncs and records them, which
    another thread may call.

    Raises: DataError for the first row that cannot be used, unless such rows are to be skipped;
            Unfinished for a full disk.
    """
    writer = RangeWriter(
        folder, work.number, vocab_size=packing.tokenizer.vocab_size, num_bytes=work.num_bytes
    )
    try:
        skipped = pack(work.jobs, packing, writer, tell)
    except BaseException:
        writer.abandon()
        raise
    return partial(writer.finish, skipped)


def record_path(folder: Path, number: int) -> Path:
    """Return where the record of a range is."""
    return folder / f"{number:06d}{RECORD}"


def read_record(path: Path) -> RangeRecord:
    """Return the record in a file.

    Raises: DataError when it is damaged, or of another flatout.
    """
    try:
        return RangeRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        folder = path.parent.parent
        raise DataError(
            f"{path} cannot be read as a record of this flatout.",
            fix=f"Remove the folder {folder}, to begin again.",
        ) from error
