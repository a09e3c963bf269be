"""Reads several files as one array. Each 4 MiB block is checked when it is first read from."""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from flatout.errors import DataError
from flatout.storage.files import BLOCK_BYTES, Array, FileEntry, unless_broken

RESTORE = "Restore it from a copy, or delete the directory and run `flatout prepare` again."
"""The fix for a damaged file of a dataset."""
CHECK_THREADS = 4
"""Threads that check blocks when several are first read at once, as in a run's first step."""
JOINED_BYTES = 16 << 10
"""Rows up to this size are joined and copied at once: a separate copy costs more for each."""
SIZE_CHECK_INTERVAL_S = 1.0
"""Interval between size checks of open files: one costs as much as reading a few sequences."""


class Span(NamedTuple):
    """Consecutive items of a file."""

    entry: FileEntry
    start: int
    """Index of the first item in the file."""
    length: int
    """Number of items."""


class ShardedArray:
    """Spans of several files, memory-mapped and read as one long array."""

    def __init__(self, folder: Path, spans: Sequence[Span], dtype: DTypeLike) -> None:
        spans = [span for span in spans if span.length]
        self._entries = [span.entry for span in spans]
        self._paths = [folder / entry.name for entry in self._entries]
        self._stored = np.dtype(dtype).newbyteorder("<")
        self._block_items = BLOCK_BYTES // self._stored.itemsize
        self._start = np.array([span.start for span in spans], np.int64)
        counts = np.array([span.length for span in spans], np.int64)
        self._first = np.concatenate([[0], np.cumsum(counts)])
        self._start_block = self._start // self._block_items
        num_blocks = (self._start + counts - 1) // self._block_items + 1 - self._start_block
        self._first_block = np.concatenate([[0], np.cumsum(num_blocks)])
        self._checked = np.zeros(self._first_block[-1], np.bool_)
        self._all_checked = False
        self._next_size_check_s = 0.0

    @cached_property
    def _maps(self) -> list[mmap.mmap]:
        try:
            return [
                _map_file(path, entry.size_bytes)
                for path, entry in zip(self._paths, self._entries, strict=True)
            ]
        except OSError as error:
            raise DataError(
                f"Cannot read the dataset: {error}.",
                fix=unless_broken(error, "Check that the directory still exists and is readable."),
            ) from error

    @cached_property
    def _files(self) -> list[memoryview]:
        size = self._stored.itemsize
        begins, counts = self._start * size, np.diff(self._first) * size
        parts = zip(self._maps, begins.tolist(), counts.tolist(), strict=True)
        return [memoryview(mapped)[begin : begin + count] for mapped, begin, count in parts]

    def locate(self, item: int) -> tuple[str, int]:
        """Return the file that contains an item, and the item's index in it."""
        file = int(np.searchsorted(self._first, item, side="right")) - 1
        return self._paths[file].name, item - int(self._first[file] - self._start[file])

    def read(self, starts: Array, out: Array) -> None:
        """Copy `out.shape[1]` items from each start into the rows of `out`, a contiguous array."""
        width = out.shape[1]
        if not len(starts) or not width:
            return
        if starts.min() < 0 or starts.max() + width > self._first[-1]:
            raise DataError(
                f"Items {int(starts.min())} to {int(starts.max()) + width} were requested. "
                f"There are {int(self._first[-1])}.",
                fix="Read sequences below num_sequences(seq_len).",
            )
        file_of = self._first.searchsorted(starts, "right") - 1
        self._check_sizes()
        if not self._all_checked:
            lasts = starts + width - 1
            last_file = np.searchsorted(self._first, lasts, side="right") - 1
            self._check_blocks(self._block_of(starts, file_of), self._block_of(lasts, last_file))
        assert out.itemsize == self._stored.itemsize, "bytes are copied without conversion"
        files, size = self._files, width * out.itemsize
        begins = (starts - self._first[file_of]) * out.itemsize
        places = zip(file_of.tolist(), begins.tolist(), strict=True)
        pieces = [files[file][begin : begin + size] for file, begin in places]
        for row in np.flatnonzero(starts + width > self._first[file_of + 1])[::-1].tolist():
            file, parts = int(file_of[row]), [pieces[row]]
            while left := size - sum(map(len, parts)):  # the row continues in the next file
                file += 1
                parts.append(files[file][:left])
            pieces[row : row + 1] = parts
        rows, at = out.data.cast("B"), 0
        if size <= JOINED_BYTES:
            rows[:] = b"".join(pieces)
            return
        for piece in pieces:
            rows[at : at + len(piece)] = piece
            at += len(piece)

    def read_spans(self, starts: Array, lengths: Array, out: Array) -> None:
        """Copy lengths[n] items from starts[n] to the start of out[n], and pad the rest with 0."""
        width = out.shape[1]
        whole = starts + width <= self._first[-1]
        rows = np.empty((int(whole.sum()), width), out.dtype)
        self.read(starts[whole], rows)  # reads past the ends of spans, so that one call is enough
        out[whole] = rows
        for row in np.flatnonzero(~whole):
            self.read(starts[row : row + 1], out[row : row + 1, : lengths[row]])
        out[np.arange(width) >= lengths[:, np.newaxis]] = 0

    def _check_sizes(self) -> None:
        """Reject a file resized while mapped: reading past its end would kill the process."""
        if time.monotonic() < self._next_size_check_s:
            return
        for path, entry, mapped in zip(self._paths, self._entries, self._maps, strict=True):
            _require_size(path, mapped.size(), entry.size_bytes)
        self._next_size_check_s = time.monotonic() + SIZE_CHECK_INTERVAL_S

    def _block_of(self, items: Array, file_of: Array) -> Array:
        in_file = items - self._first[file_of] + self._start[file_of]
        block: Array = in_file // self._block_items - self._start_block[file_of]
        block += self._first_block[file_of]
        return block

    def _check_blocks(self, first: Array, last: Array) -> None:
        steps = range(int((last - first).max()) + 1)
        touched = np.unique(np.concatenate([np.minimum(first + step, last) for step in steps]))
        unchecked = touched[~self._checked[touched]].tolist()
        for block, problem in zip(unchecked, self._problems(unchecked), strict=True):
            if problem is not None:
                raise DataError(problem, fix=RESTORE)
            self._checked[block] = True
        self._all_checked = bool(self._checked.all())

    def _problems(self, blocks: Sequence[int]) -> Iterator[str | None]:
        """Yield the problem with each block, or None, in order. Threads check several blocks."""
        if len(blocks) < 2:
            yield from map(self._problem, blocks)
            return
        with ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="flatout-check") as pool:
            yield from pool.map(self._problem, blocks)

    def _problem(self, block: int) -> str | None:
        """Return the problem with a block, with its file and byte. None when it is intact.

        The block is read rather than mapped, so a failing disk raises an error instead of killing
        the process.
        """
        file = int(np.searchsorted(self._first_block, block, side="right")) - 1
        number = block - int(self._first_block[file] - self._start_block[file])
        path, entry = self._paths[file], self._entries[file]
        start = number * BLOCK_BYTES
        size = min(entry.size_bytes - start, BLOCK_BYTES)
        where = f"{path}, byte {start}: the {size}-byte block at this offset"
        try:
            with path.open("rb") as stored:
                stored.seek(start)
                content = stored.read(size)
        except OSError as error:
            return f"{where} cannot be read: {error.strerror or error}."
        is_whole = zlib.crc32(content) == entry.block_crc32[number]
        return None if is_whole else f"{where} fails its checksum."


def _map_file(path: Path, size: int) -> mmap.mmap:
    with path.open("rb") as file:
        _require_size(path, os.fstat(file.fileno()).st_size, size)
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _require_size(path: Path, found: int, size: int) -> None:
    if found != size:
        raise DataError(
            f"{path} now has {found} bytes. It had {size} when the dataset was opened.",
            fix="Restore the file, or prepare the dataset again. Then run the same command: "
            "a run resumes from its last checkpoint.",
        )
