"""Tokens on disk: opens a data set folder (`writer.py` makes one) and cuts windows out of it.

A folder is `manifest.json`, `tokenizer.json`, `{train,val}-NNNNN.bin` (flat tokens),
`{train,val}-documents.bin` (int64 ends) and, with a loss mask, `{train,val}-NNNNN.mask.bin`
(uint8). Every 4 MiB block has a CRC-32: sizes are checked when a folder is opened and whenever a
file is read, a block when something in it is first read.

Letters in names: N windows, T tokens of one window, W = T + 1 (a window and its last target).
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flatout.data.store.integrity import (
    MASKS,
    PREPARE_AGAIN,
    Items,
    ends_of,
    file_problems,
    tokens_of,
)
from flatout.data.store.manifest import (
    BLOCK_BYTES,
    FileEntry,
    Manifest,
    SplitEntry,
    SplitName,
    read_manifest,
)
from flatout.data.store.order import shuffled
from flatout.errors import DataError
from flatout.files import expanded

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]

CHECKERS = 4
"""Threads that check blocks, where several are touched for the first time together: as the first
step of a run does.
"""
SIZES_EVERY_S = 1.0
"""How often the sizes of the files in use are looked at: each look costs as much as reading some
windows.
"""


class Dataset:
    """A prepared data set folder, opened for reading."""

    def __init__(self, path: Path, manifest: Manifest, *, origin: str | None = None) -> None:
        self.path = path
        self.origin = str(path) if origin is None else origin
        """The folder, or the URL that this folder is a copy of."""
        self.manifest = manifest
        self._splits: dict[str, Split] = {}

    @classmethod
    def open(cls, path: Path | str, *, origin: str | None = None) -> Dataset:
        """Open the folder; its manifest, its tokenizer and every file's size are checked, tokens
        are not read.

        Raises: DataError when it is no data set, or a file is missing, has another size, or is
                another tokenizer.
        """
        folder = expanded(path)
        dataset = cls(folder, read_manifest(folder), origin=origin)
        for problem in file_problems(folder, dataset.manifest):
            raise DataError(problem.what, fix=problem.fix)
        return dataset

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.manifest.vocab_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder, loaded when first asked for."""
        from flatout.data.tokenizers import (
            load_tokenizer,
        )  # reading tokens alone needs no tokenizer library

        return load_tokenizer(
            self.path / self.manifest.tokenizer.file, sha256=self.manifest.tokenizer.digest
        )

    def split(self, name: SplitName) -> Split:
        """Return `train` or `val`; a split without documents has no tokens."""
        if name not in self._splits:
            self._splits[name] = Split(self.path, name, self.manifest)
        return self._splits[name]


class SplitReader(Protocol):
    """What a feed reads, window by window: a split, or several in a mix."""

    name: str
    num_tokens: int
    has_mask: bool
    dtype: np.dtype[Any]

    def num_sequences(self, seq_len: int) -> int:
        """Return how many windows of seq_len + 1 tokens there are; their indices are below it."""

    def sequences_at(self, positions: Array, seq_len: int, *, seed: int) -> Array:
        """Return the index of the window at each position of the endless reading that `seed` names.

        Shapes:  positions (N,), integers from 0; returns (N,).
        """

    def read_sequences(self, indices: Array, seq_len: int, out: Array) -> None:
        """Copy windows into `out`.

        Shapes:  indices (N,), out (N, T + 1).
        """

    def read_mask(self, indices: Array, seq_len: int, out: Array) -> None:
        """Write True where a window's target counts; only where `has_mask`.

        Shapes:  indices (N,), out (N, T) bool.
        """

    def read_document_ids(self, indices: Array, seq_len: int, out: Array) -> None:
        """Number the documents within each window's inputs.

        Shapes:  indices (N,), out (N, T) int32.
        """


class Split:
    """One split's tokens as one long line, from which windows are cut.

    Window i covers the tokens i*T to i*T + T, both included: T inputs and, one further on, T
    targets.
    """

    def __init__(self, folder: Path, name: SplitName, manifest: Manifest) -> None:
        empty = SplitEntry(
            tokens=0,
            documents=0,
            text_bytes=0,
            shards=(),
            document_ends=FileEntry(name="none", size_bytes=0, block_crc32=()),
        )
        entry = manifest.splits.get(name, empty)
        self.folder = folder
        self.name: str = name
        self.num_tokens = entry.tokens
        self.num_documents = entry.documents
        self.text_bytes = entry.text_bytes
        self.has_mask = bool(entry.masks)
        self.dtype = np.dtype(manifest.dtype)
        self._tokens = _Tape(folder, entry.shards, tokens_of(manifest))
        self._masks = _Tape(folder, entry.masks, MASKS)
        self._ends = _Tape(folder, (entry.document_ends,), ends_of(entry))

    def num_sequences(self, seq_len: int) -> int:
        """Return how many whole windows of seq_len + 1 tokens there are."""
        return max(self.num_tokens - 1, 0) // seq_len

    def sequences_at(self, positions: Array, seq_len: int, *, seed: int) -> Array:
        """Return the index of the window at each position of an endless reading, in which every
        epoch is another permutation.

        Shapes:  positions (N,), integers from 0; returns (N,).
        """
        return shuffled(positions, self.num_sequences(seq_len), seed=seed)

    def read_sequences(self, indices: Array, seq_len: int, out: Array) -> None:
        """Copy windows into `out`, which has the shards' dtype.

        Shapes:  indices (N,), out (N, T + 1).
        Raises: DataError with the file and the byte when a block fails its checksum.
        """
        self._tokens.read(indices.astype(np.int64) * seq_len, out)

    def read_tokens(self, start: int, stop: int) -> Array:
        """Return a copy of the tokens from `start` up to, not including, `stop`."""
        out = np.empty(stop - start, self.dtype)
        self._tokens.read(np.array([start]), out[np.newaxis])
        return out

    def read_spans(self, starts: Array, lengths: Array, out: Array) -> None:
        """Copy lengths[n] tokens from starts[n] on to the beginning of out[n], and write 0 behind
        them.

        Shapes:  starts, lengths (N,), lengths at most W; out (N, W).
        """
        self._tokens.read_spans(starts, lengths, out)

    def read_mask_spans(self, starts: Array, lengths: Array, out: Array) -> None:
        """Copy the mask of lengths[n] tokens from starts[n] on to the beginning of out[n], and
        write False behind them.

        Shapes:  starts, lengths (N,), lengths at most W; out (N, W) bool.
        """
        self._masks.read_spans(starts, lengths, out)

    def read_mask(self, indices: Array, seq_len: int, out: Array) -> None:
        """Write True where a window's target counts; only for a split that has a mask.

        Shapes:  indices (N,), out (N, T) bool.
        """
        self._masks.read(indices.astype(np.int64) * seq_len + 1, out)

    def read_mask_range(self, start: int, stop: int) -> Array:
        """Return the mask of the tokens from `start` up to, not including, `stop`."""
        out = np.empty(stop - start, np.bool_)
        self._masks.read(np.array([start]), out[np.newaxis])
        return out

    def read_document_ids(self, indices: Array, seq_len: int, out: Array) -> None:
        """Number the documents within each window's inputs: 0 for the one it begins in, then 1, 2,
        ...

        Shapes:  indices (N,), out (N, T) int32.
        """
        starts = indices.astype(np.int64) * seq_len
        ends = self.document_ends
        # A document that ends at position e (exclusive) makes position e the first of the next: add
        # one from there on.
        first, last = (
            np.searchsorted(ends, starts, side="right"),
            np.searchsorted(ends, starts + seq_len - 1, side="right"),
        )
        counts = last - first
        rows = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        out[:] = 0
        out[rows, ends[first[rows] + within] - starts[rows]] = 1
        np.cumsum(out, axis=1, out=out)

    def block_problems(self, *, but: Container[str] = ()) -> Iterator[tuple[int, str | None]]:
        """Check every block of every file, but the files that are named; yield its size in bytes
        and what is wrong with it, if anything.
        """
        for tape in (self._tokens, self._masks, self._ends):
            yield from tape.block_problems(but=but)

    @cached_property
    def document_ends(self) -> Array:
        """The position after each document's last token, ascending."""
        out = np.empty(self.num_documents, np.int64)
        self._ends.read(np.array([0]), out[np.newaxis])
        return out


class _Tape:
    """Several files read as one long array; each 4 MiB block is checked when something in it is
    first read.
    """

    def __init__(self, folder: Path, entries: Sequence[FileEntry], items: Items) -> None:
        dtype = items.dtype
        self._items = items
        self._entries = [entry for entry in entries if entry.size_bytes]
        self._paths = [folder / entry.name for entry in self._entries]
        self._stored = dtype.newbyteorder("<")
        lengths = [entry.size_bytes // dtype.itemsize for entry in self._entries]
        self._first = np.cumsum([0, *lengths])
        self._first_block = np.cumsum([0, *(len(entry.block_crc32) for entry in self._entries)])
        self._block_items = BLOCK_BYTES // dtype.itemsize
        self._checked = np.zeros(self._first_block[-1], np.bool_)
        self._all_checked = False
        self._sizes_due_s = 0.0

    @cached_property
    def _maps(self) -> list[mmap.mmap]:
        try:
            return [
                _mapped(path, entry.size_bytes)
                for path, entry in zip(self._paths, self._entries, strict=True)
            ]
        except OSError as error:
            raise DataError(
                f"Cannot read the data set: {error}.",
                fix="Check that the folder is still there and readable.",
            ) from error

    @cached_property
    def _files(self) -> list[memoryview]:
        return [memoryview(found) for found in self._maps]

    def _check_sizes(self) -> None:
        """Refuse a file that was cut or grown under us: what is read beyond its end would end the
        process, without a word.
        """
        if time.monotonic() < self._sizes_due_s:
            return
        for path, entry, found in zip(self._paths, self._entries, self._maps, strict=True):
            size = found.size()
            if size != entry.size_bytes:
                raise _resized(path, size, entry.size_bytes)
        self._sizes_due_s = time.monotonic() + SIZES_EVERY_S

    def read(self, starts: Array, out: Array) -> None:
        """Copy `out.shape[1]` items from each start into the rows of `out`, which lie one behind
        the other.
        """
        width = out.shape[1]
        if not len(starts) or not width:
            return
        if starts.min() < 0 or starts.max() + width > self._first[-1]:
            raise DataError(
                f"Items {int(starts.min())} to {int(starts.max()) + width} were asked for; there are {int(self._first[-1])}.",
                fix="Ask for windows below num_sequences(seq_len).",
            )
        file_of = np.searchsorted(self._first, starts, side="right") - 1
        last_file = np.searchsorted(self._first, starts + width - 1, side="right") - 1
        self._check_sizes()
        if not self._all_checked:
            self._check_touched(
                self._block_of(starts, file_of), self._block_of(starts + width - 1, last_file)
            )
        assert out.itemsize == self._stored.itemsize, "bytes are copied as they lie"
        rows, size = out.data.cast("B"), width * out.itemsize
        begins = (starts - self._first[file_of]) * out.itemsize
        for row, (file, last, begin) in enumerate(
            zip(file_of.tolist(), last_file.tolist(), begins.tolist(), strict=True)
        ):
            if file == last:
                rows[row * size : (row + 1) * size] = self._files[file][begin : begin + size]
            else:
                self._read_across(int(starts[row]), out[row])

    def read_spans(self, starts: Array, lengths: Array, out: Array) -> None:
        """Copy lengths[n] items from starts[n] on to the beginning of out[n], and write 0 behind
        them.
        """
        width = out.shape[1]
        whole = starts + width <= self._first[-1]
        rows = np.empty((int(whole.sum()), width), out.dtype)
        self.read(
            starts[whole], rows
        )  # what follows is read too: rows of one width are read at once
        out[whole] = rows
        for row in np.flatnonzero(~whole):
            self.read(starts[row : row + 1], out[row : row + 1, : lengths[row]])
        out[np.arange(width) >= lengths[:, np.newaxis]] = 0

    def _read_across(self, start: int, out_row: Array) -> None:
        done = 0
        while done < len(out_row):
            file = int(np.searchsorted(self._first, start + done, side="right")) - 1
            offset = start + done - int(self._first[file])
            piece = np.frombuffer(self._files[file], self._stored)[
                offset : offset + len(out_row) - done
            ]
            out_row[done : done + len(piece)] = piece
            done += len(piece)

    def _block_of(self, items: Array, file_of: Array) -> Array:
        blocks: Array = (
            self._first_block[file_of] + (items - self._first[file_of]) // self._block_items
        )
        return blocks

    def _check_touched(self, first: Array, last: Array) -> None:
        touched = np.unique(
            np.concatenate(
                [np.minimum(first + step, last) for step in range(int((last - first).max()) + 1)]
            )
        )
        unchecked = touched[~self._checked[touched]].tolist()
        for block, problem in zip(unchecked, self._problems(unchecked), strict=True):
            if problem is not None:
                raise DataError(problem, fix=PREPARE_AGAIN)
            self._checked[block] = True
        self._all_checked = bool(self._checked.all())

    def block_problems(self, *, but: Container[str]) -> Iterator[tuple[int, str | None]]:
        """Check every block of the files, but those that are named; yield each one's size in bytes
        and what is wrong with it, if anything.
        """
        for file, entry in enumerate(self._entries):
            if entry.name not in but:
                blocks = range(int(self._first_block[file]), int(self._first_block[file + 1]))
                for within, problem in enumerate(self._problems(blocks)):
                    yield min(entry.size_bytes - within * BLOCK_BYTES, BLOCK_BYTES), problem

    def _problems(self, blocks: Sequence[int]) -> Iterator[str | None]:
        """Yield what is wrong with each block, in their order; several threads read and sum, which
        is all the work there is.
        """
        if len(blocks) < 2:
            yield from map(self._problem, blocks)
            return
        with ThreadPoolExecutor(CHECKERS, thread_name_prefix="flatout-check") as pool:
            yield from pool.map(self._problem, blocks)

    def _problem(self, block: int) -> str | None:
        """Read a block and say what is wrong with it, with its file and the byte; None when it is
        whole.

        It is read and not mapped: what the disk refuses is an error then, and not the end of the
        process.
        """
        file = int(np.searchsorted(self._first_block, block, side="right")) - 1
        within = block - int(self._first_block[file])
        start, size = (
            within * BLOCK_BYTES,
            min(self._entries[file].size_bytes - within * BLOCK_BYTES, BLOCK_BYTES),
        )
        where = f"{self._paths[file]}, byte {start}"
        room = np.empty(size, np.uint8)
        try:
            with self._paths[file].open("rb") as opened:
                opened.seek(start)
                if opened.readinto(room.data) != size:
                    return f"{where}: the block of {size} bytes from there cannot be read whole."
        except OSError as error:
            return f"{where}: the block of {size} bytes from there cannot be read: {error.strerror or error}."
        if zlib.crc32(room.data) != self._entries[file].block_crc32[within]:
            return f"{where}: the block of {size} bytes from there fails its checksum."
        return self._items.problem(room, self._paths[file], start)


def _mapped(path: Path, size: int) -> mmap.mmap:
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise _resized(path, found, size)
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _resized(path: Path, found: int, size: int) -> DataError:
    return DataError(
        f"{path} has {found} bytes now; it had {size} when the data set was opened.",
        fix="Put the file back, or prepare the data set again; then run the same command: a run goes on from its last checkpoint.",
    )
