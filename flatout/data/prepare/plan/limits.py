"""Limits at which prepare stops: free disk space, bad rows, damaged text."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.data.prepare.pack.records import RangeRecord
from flatout.data.store.manifest import StoredLocation, token_dtype
from flatout.data.tokenizers import Tokenizer
from flatout.errors import DataError
from flatout.files import Unfinished
from flatout.progress import readable_size
from flatout.sources import FIRST_NAMED
from flatout.sources.packed import CANNOT_BE_READ

SHARD_BYTES = 128 * 1024 * 1024
"""Size of a shard; joining needs this much space besides the tokens."""
BAD_SHARE = 0.01
"""Default limit of bad rows, as a share of the rows so far; BAD_ROWS if that is more."""
BAD_ROWS = 100
"""Number of bad rows that the default limit always allows."""
UNREAD_SHARE = 0.01
"""Maximum share of the text that may be damaged."""

TEXT_BYTES_PER_TOKEN = 3.0
"""Cautious estimate for subword tokenizers: most text has more bytes per token."""


def check_space(out: Path, task_bytes: Sequence[int], tokenizer: Tokenizer) -> None:
    """Check that the disk has room for the dataset, if its size can be estimated.

    Raises: DataError with the space needed and the space free.
    """
    directory = next(parent for parent in out.resolve().parents if parent.is_dir())
    tokens = sum(task_bytes) / (1.0 if tokenizer.name in ("char", "byte") else TEXT_BYTES_PER_TOKEN)
    size = tokens * np.dtype(token_dtype(tokenizer.vocab_size)).itemsize
    needed, free = int(size + min(size, SHARD_BYTES)), shutil.disk_usage(directory).free
    if all(task_bytes) and needed > free:
        raise DataError(
            f"Preparing the dataset needs about {readable_size(needed)} of disk space, and "
            f"{readable_size(free)} are free in {directory}.",
            fix="Free space there, choose another --out, or take less text with --max-bytes.",
        )


class BadRowLimit:
    """Counts the bad rows of ranges in order, and raises when there are too many.

    A damaged region of any length counts as one bad row, so lost bytes are limited too, as a share
    of `num_bytes`. A `limit` of None is the default limit.
    """

    def __init__(self, limit: int | None, num_bytes: int) -> None:
        self._limit = limit
        self._num_bytes = num_bytes
        self._rows = self._bad = self._unread_bytes = 0
        self._first: tuple[StoredLocation, str] | None = None
        self._damaged: list[StoredLocation] = []

    def add(self, record: RangeRecord) -> None:
        """Count the rows of the next range.

        Raises: Unfinished for too many bad rows, naming the first; DataError when too much of the
                text is damaged, which a higher limit cannot fix.
        """
        self._rows += record.documents + sum(rows.count for rows in record.skipped)
        self._bad += record.bad_rows
        self._first = self._first or record.first_bad
        limit = max(BAD_ROWS, int(self._rows * BAD_SHARE)) if self._limit is None else self._limit
        if self._bad > limit:
            assert self._first is not None
            location, what = self._first
            raise Unfinished(
                f"{self._bad:,} of the first {self._rows:,} rows are unusable, and {limit:,} may "
                f"be skipped. The first: {location} {what}.",
                fix="Look at these rows, or allow more with --max-bad-rows "
                f"{10 * self._bad}, which keeps the work done so far.",
            )
        self._unread_bytes += record.unread_bytes
        for rows in record.skipped:
            if rows.reason == CANNOT_BE_READ:
                self._damaged += rows.first
        if self._unread_bytes > UNREAD_SHARE * self._num_bytes:
            share = min(self._unread_bytes / max(self._num_bytes, 1), 1)
            damaged = ", ".join(map(str, self._damaged[:FIRST_NAMED]))
            raise DataError(
                f"{share:.1%} of the text is in damaged files, or damaged regions of files, and at "
                f"most {UNREAD_SHARE:.0%} may be: {damaged}.",
                fix="Download these files again, remove them from the source, or decompress their "
                "readable part and use that instead.",
            )
