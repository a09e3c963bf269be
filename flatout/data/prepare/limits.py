"""What prepare stops at: a disk without room, more bad rows than a sound text has, and damage."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatout.data.prepare.merge import SHARD_BYTES
from flatout.data.prepare.ranges import RangeRecord
from flatout.data.store.manifest import token_dtype
from flatout.errors import DataError
from flatout.files import Unfinished
from flatout.progress import readable_size
from flatout.sources import FIRST_NAMED, RowLocation
from flatout.sources.packed import CANNOT_BE_READ

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

BAD_SHARE = 0.01
"""Of the rows so far, so many may be bad when no limit is stated,"""
BAD_ROWS = 100
"""and this many in any case."""
UNREAD_SHARE = 0.01
"""Of all the text, so much may lie in what is damaged."""

TEXT_BYTES_PER_TOKEN = 3.0
"""Of a tokenizer that joins letters; most text has more, and the disk needs less."""


def check_space(out: Path, part_bytes: Sequence[int], tokenizer: Tokenizer) -> None:
    """Do nothing when there is room for the data set, as far as its size can be told, or when it
    cannot.

    Raises: DataError saying what it takes and what there is.
    """
    place = next(folder for folder in out.resolve().parents if folder.is_dir())
    tokens = sum(part_bytes) / (1.0 if tokenizer.name in ("char", "byte") else TEXT_BYTES_PER_TOKEN)
    size = tokens * np.dtype(token_dtype(tokenizer.vocab_size)).itemsize
    needed, free = int(size + min(size, SHARD_BYTES)), shutil.disk_usage(place).free
    if all(part_bytes) and needed > free:
        raise DataError(
            f"The data set takes about {readable_size(needed)} while it is made, and {readable_size(free)} are free in {place}.",
            fix="Make room there, choose another --out, or take less text with --max-bytes.",
        )


class BadRowLimit:
    """Counts the bad rows of ranges in order, and stops at too many; None stands for the usual
    limit.

    What is damaged is one row, however much is lost in it: that much of the text is counted too, of
    which there are `num_bytes` in all.
    """

    def __init__(self, most: int | None, num_bytes: int) -> None:
        self._most = most
        self._num_bytes = num_bytes
        self._rows = self._bad = self._unread_bytes = 0
        self._first: tuple[RowLocation, str] | None = None
        self._damaged: list[RowLocation] = []

    def add(self, record: RangeRecord) -> None:
        """Count those of the next range.

        Raises: Unfinished saying how many rows are bad, and what is wrong with the first; DataError
                when more is damaged than may be:
        what would do is another text.
        """
        self._rows += record.documents + sum(entry.count for entry in record.skipped)
        self._bad += record.bad_rows
        self._first = self._first or record.first_bad
        limit = max(BAD_ROWS, int(self._rows * BAD_SHARE)) if self._most is None else self._most
        if self._bad > limit:
            assert self._first is not None
            place, what = self._first
            raise Unfinished(
                f"{self._bad:,} of the first {self._rows:,} rows cannot be used, and {limit:,} may be skipped. The first: {place.where()} {what}.",
                fix=f"Look at these rows, or allow more with --max-bad-rows {10 * self._bad}, which keeps what is done.",
            )
        self._unread_bytes += record.unread_bytes
        self._damaged += [
            place
            for entry in record.skipped
            if entry.reason == CANNOT_BE_READ
            for place in entry.first
        ]
        if self._unread_bytes > UNREAD_SHARE * self._num_bytes:
            share = min(self._unread_bytes / max(self._num_bytes, 1), 1)
            damaged = ", ".join(place.where() for place in self._damaged[:FIRST_NAMED])
            raise DataError(
                f"{share:.1%} of the text lies in files, or parts of them, that are damaged, and {UNREAD_SHARE:.0%} may be left out: {damaged}.",
                fix="Fetch these files again; or take them out of the source, or unpack what is left of them, and name that.",
            )
