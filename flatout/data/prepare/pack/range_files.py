"""The files of a range: `NNNNNN.{train,val}.{bin,ends,mask,marks}`.

They contain the tokens, the position after each document's last token (from the range's start), the
loss mask, and the marks that identify duplicates. The range's record is written last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.data.prepare.pack.records import (
    RangeRecord,
    RangeSplit,
    record_path,
)
from flatout.data.store.manifest import SPLITS, token_dtype
from flatout.errors import DataError
from flatout.files import Array, CheckedFile, sync, write_whole, writing


class SplitWriter:
    """Writes the files of one split of a range; a file is created when it has content."""

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
        marks: Array | None = None,
    ) -> None:
        """Append tokens; `ends` are the positions in `tokens` after each document's last token.

        A document may continue in the next call. `mask` is 0 where a token is not a target; either
        every call for a split has a mask, or none does.

        Shapes:  tokens (T,), any integer type; ends (documents,), ascending, at most T; mask (T,);
                 marks (documents,) of MARK.
        Raises: DataError for an id outside the vocabulary.
        """
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise DataError(
                f"The tokenizer returned ids from {int(tokens.min())} to {int(tokens.max())}, but "
                f"states a vocabulary of {self._vocab_size}.",
                fix="Correct the tokenizer's vocab_size.",
            )
        assert not self._tokens or ("mask" in self._files) == (mask is not None), (
            "either every call for a split has a mask, or none does"
        )
        assert mask is None or len(mask) == len(tokens)
        ends = np.asarray(ends, np.int64) + self._tokens
        steps = np.diff(ends, prepend=self._last_end)
        assert not len(steps) or (steps.min() > 0 and ends[-1] <= self._tokens + len(tokens)), (
            "document ends must ascend within the tokens"
        )
        with writing(self._folder.parent):
            self._write("bin", tokens.astype(self._dtype))
            self._write("ends", ends.astype("<i8"))
            if mask is not None:
                self._write("mask", (mask != 0).astype(np.uint8))
            if marks is not None:
                self._write("marks", marks)
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
        """Sync and rename the files; tokens after the last end form one more document."""
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
    """Writes a range's files; `finish` records them."""

    def __init__(self, folder: Path, number: int, *, vocab_size: int, num_bytes: int = 0) -> None:
        self._folder = folder
        self.record = RangeRecord(number=number, num_bytes=num_bytes)
        """Counts the rows left out, and receives the splits at the end."""
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
