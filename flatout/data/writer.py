"""Writes a data set folder: under a temporary name, synced, checksummed, the manifest last, then one rename."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from flatout.data.manifest import (
    BLOCK_BYTES,
    SPLITS,
    TOKENIZER,
    FileEntry,
    Manifest,
    SkippedEntry,
    SplitEntry,
    SplitName,
    TokenizerEntry,
    token_dtype,
    write_manifest,
)
from flatout.errors import DataError

if TYPE_CHECKING:
    from flatout.data.tokenizer import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]

SHARD_BYTES = 128 * 1024 * 1024


class DatasetWriter:
    """A data set folder being written. Use as a context manager: what is not finished is removed.

    with DatasetWriter(out, vocab_size=...) as writer:
        writer.train.append(tokens, ends, text_bytes=...)
        manifest = writer.finish(tokenizer=..., source=..., split_rule=...)

    Raises: DataError when `out` already holds something, another process writes it, or the disk refuses.
    """

    def __init__(self, out: Path | str, *, vocab_size: int, shard_bytes: int = SHARD_BYTES) -> None:
        self.out = Path(out)
        self.vocab_size = vocab_size
        self._place = self.out.resolve()
        self._folder = self._place.parent / f".{self._place.name}.part"
        self._finished = False
        _refuse_occupied(self.out)
        with writing(self.out):
            self._lock = _own_folder(self._folder, self.out)
        self._splits = {name: SplitWriter(self._folder, name, vocab_size=vocab_size, shard_bytes=shard_bytes) for name in SPLITS}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for split in self._splits.values():
            split.abandon()
        if not self._finished:
            shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    @property
    def train(self) -> SplitWriter:
        """The training split."""
        return self._splits["train"]

    @property
    def val(self) -> SplitWriter:
        """The validation split."""
        return self._splits["val"]

    def finish(self, *, tokenizer: Tokenizer, source: Mapping[str, Any], split_rule: str, skipped: Sequence[SkippedEntry] = ()) -> Manifest:
        """Sync everything, write the manifest, rename the folder into place, and return the manifest."""
        with writing(self.out):
            tokenizer.save(self._folder / TOKENIZER)
            manifest = Manifest(
                dtype=token_dtype(self.vocab_size),
                vocab_size=self.vocab_size,
                tokenizer=TokenizerEntry(name=tokenizer.name, digest=tokenizer.digest()),
                splits={name: split.finish() for name, split in self._splits.items()},
                source=dict(source),
                split_rule=split_rule,
                skipped=tuple(skipped),
            )
            sync(self._folder / TOKENIZER)
            write_manifest(self._folder, manifest)
            sync(self._folder)
            _refuse_occupied(self.out)
            self._folder.replace(self._place)
            self._finished = True
            sync(self._place.parent)
        return manifest


class SplitWriter:
    """Appends tokens and document ends of one split to its shards."""

    def __init__(self, folder: Path, name: SplitName, *, vocab_size: int, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._name = name
        self._vocab_size = vocab_size
        self._dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._shard_tokens = max(shard_bytes // self._dtype.itemsize, 1)
        self._shards: list[_CheckedFile] = []
        self._masks: list[_CheckedFile] = []
        self._ends = _CheckedFile(folder / f"{name}-documents.bin")
        self._room = 0
        self._last_end = 0
        self.num_tokens = 0
        self.num_documents = 0
        self.text_bytes = 0

    def append(self, tokens: Array, ends: Array | Sequence[int], *, text_bytes: int, mask: Array | None = None) -> None:
        """Append tokens; `ends` are the positions in `tokens` after each document's last token.

        A document may go on in the next call. `mask` is 0 where a token is no target; a split has it always or never.

        Shapes:  tokens (T,), any integer type; ends (documents,), ascending, at most T; mask (T,).
        Raises: DataError for an id the vocabulary does not have.
        """
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise DataError(
                f"The tokenizer gave the ids {int(tokens.min())} to {int(tokens.max())}, but says its vocabulary has {self._vocab_size}.",
                fix="Repair the tokenizer's vocab_size.",
            )
        assert self.num_tokens == 0 or bool(self._masks) == (mask is not None), "a split has a mask always or never"
        assert mask is None or len(mask) == len(tokens)
        global_ends = np.asarray(ends, np.int64) + self.num_tokens
        steps = np.diff(global_ends, prepend=self._last_end)
        assert not len(steps) or (steps.min() > 0 and global_ends[-1] <= self.num_tokens + len(tokens)), "document ends must ascend within the tokens"
        with writing(self._folder):
            self._append_items(tokens, mask)
            self._ends.write(global_ends.astype("<i8"))
        self.num_tokens += len(tokens)
        self.num_documents += len(global_ends)
        self.text_bytes += text_bytes
        self._last_end = int(global_ends[-1]) if len(global_ends) else self._last_end

    def _append_items(self, tokens: Array, mask: Array | None) -> None:
        done = 0
        while done < len(tokens):
            if not self._room:
                self._next_shard(mask)
            piece = slice(done, done + self._room)
            self._shards[-1].write(tokens[piece].astype(self._dtype))
            if mask is not None:
                self._masks[-1].write((mask[piece] != 0).astype(np.uint8))
            written = len(tokens[piece])
            self._room -= written
            done += written

    def _next_shard(self, mask: Array | None) -> None:
        number = len(self._shards)
        if number:
            self._shards[-1].close()
        self._shards.append(_CheckedFile(self._folder / f"{self._name}-{number:05d}.bin"))
        if mask is not None:
            if number:
                self._masks[-1].close()
            self._masks.append(_CheckedFile(self._folder / f"{self._name}-{number:05d}.mask.bin"))
        self._room = self._shard_tokens

    def finish(self) -> SplitEntry:
        """Close and sync the files and return their entry; tokens after the last end are one more document."""
        if self._last_end < self.num_tokens:
            self._ends.write(np.array([self.num_tokens], "<i8"))
            self._last_end = self.num_tokens
            self.num_documents += 1
        return SplitEntry(
            tokens=self.num_tokens,
            documents=self.num_documents,
            text_bytes=self.text_bytes,
            shards=tuple(shard.close() for shard in self._shards),
            document_ends=self._ends.close(),
            masks=tuple(mask.close() for mask in self._masks),
        )

    def abandon(self) -> None:
        """Close the files without caring for their content; closing twice does nothing."""
        for file in (*self._shards, *self._masks, self._ends):
            file.abandon()


class _CheckedFile:
    """A file being written, with a CRC-32 for every 4 MiB block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=1 << 20)
        self._size = 0
        self._crc = 0
        self._crcs: list[int] = []
        self._entry: FileEntry | None = None

    def write(self, items: Array) -> None:
        """Append the array's bytes."""
        data = np.ascontiguousarray(items).data.cast("B") if items.size else memoryview(b"")
        self._file.write(data)
        while data:
            piece = data[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            self._crc = zlib.crc32(piece, self._crc)
            self._size += len(piece)
            data = data[len(piece) :]
            if self._size % BLOCK_BYTES == 0:
                self._crcs.append(self._crc)
                self._crc = 0

    def close(self) -> FileEntry:
        """Sync, close and return the entry; the second time only return it."""
        if self._entry is None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            crcs = self._crcs + [self._crc] * (self._size % BLOCK_BYTES != 0)
            self._entry = FileEntry(name=self.path.name, size_bytes=self._size, block_crc32=tuple(crcs))
        return self._entry

    def abandon(self) -> None:
        """Close, whatever the disk says: the file will be removed."""
        with contextlib.suppress(OSError):
            self._file.close()


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn what the disk refuses into a DataError that names the folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"Cannot write {out}: {error.strerror or error}.",
            fix="Choose a folder you may write to, on a disk with room, with --out.",
        ) from error


def sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_occupied(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out} already exists and is not an empty folder.", fix="Choose another --out, or remove what is there.")


def _own_folder(folder: Path, out: Path) -> int:
    """Make the temporary folder this process's own; what a killed process left in it is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise DataError(f"Another process is writing {out}.", fix="Wait for it, or choose another --out.") from error
    for left in folder.iterdir():
        left.unlink()
    return lock
