"""Ranges to a data set: their tokens one after another, in order, in shards of 128 MiB.

Where a shard begins depends on the tokens alone, so the bytes are the same however the work was
split. A shard is recorded when it is whole, then the ranges that lie in it are removed: joining
takes the room of one shard more than the tokens, and goes on where it was killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from flatout.data.prepare.dedup import Dropped, read_ends, runs
from flatout.data.prepare.ranges import RECORD, RangeRecord, record_path
from flatout.data.prepare.work_dir import WorkFolder
from flatout.data.store.manifest import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    FileEntry,
    Manifest,
    SkippedEntry,
    SplitEntry,
    SplitName,
    TokenizerEntry,
    token_dtype,
)
from flatout.files import (
    CheckedFile,
    Unfinished,
    check_blocks,
    sync,
    write_text,
    write_whole,
    writing,
)

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]

SHARD_BYTES = 128 * 1024 * 1024
_COPIED = 4 << 20
"""Bytes copied at a time."""


class _Shard(BaseModel):
    """A shard that is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: FileEntry
    mask: FileEntry | None


def join(
    work: WorkFolder,
    records: Sequence[RangeRecord],
    tokenizer: Tokenizer,
    *,
    source: Mapping[str, Any],
    split_rule: str,
    skipped: Sequence[SkippedEntry] = (),
    dropped: Dropped | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Write the data set that all ranges, in order, make, let it take its place, and return its
    manifest.

    Documents that are `dropped` are left out; the records count what stays. Files of ranges that
    another process wrote should be checked first (`check`).

    Raises: Unfinished for a full disk.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    shard_tokens = max(shard_bytes // np.dtype(dtype).itemsize, 1)
    with writing(work.out):
        work.joined.mkdir(exist_ok=True)
        splits = {
            name: _Joining(work, name, records, dtype, dropped).split(shard_tokens)
            for name in SPLITS
        }
        tokenizer.save(work.joined / TOKENIZER)
        sync(work.joined / TOKENIZER)
        manifest = Manifest(
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            tokenizer=TokenizerEntry(name=tokenizer.name, digest=tokenizer.digest()),
            splits=splits,
            source=dict(source),
            split_rule=split_rule,
            skipped=tuple(skipped),
            cut_documents=sum(record.cut_documents for record in records),
        ).sealed()
        write_whole(work.joined / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    work.give()
    return manifest


def check(work: WorkFolder, records: Sequence[RangeRecord]) -> None:
    """Look whether the files of some ranges are as they were recorded; a range whose files are not
    is no longer done.

    Files that are not there are passed over: their tokens may be in a shard.

    Raises: Unfinished, saying how many are to be done again.
    """
    damaged = 0
    for record in records:
        entries = [entry for split in record.splits.values() for entry in split.files.values()]
        if not all(
            check_blocks(work.ranges / entry.name, entry)
            for entry in entries
            if (work.ranges / entry.name).exists()
        ):
            record_path(work.ranges, record.number).unlink()
            damaged += 1
    if damaged:
        raise _damaged(f"{damaged} of {len(records)} ranges in {work.path} were")


def _damaged(what: str) -> Unfinished:
    return Unfinished(
        f"{what} damaged on the disk.",
        fix="Run the same command again: it does that again, and keeps the rest.",
    )


class _Joining:
    """One split being joined."""

    def __init__(
        self,
        work: WorkFolder,
        name: SplitName,
        records: Sequence[RangeRecord],
        dtype: str,
        dropped: Dropped | None,
    ) -> None:
        self._work = work
        self._name = name
        self._dropped = dropped
        self._numbers = [record.number for record in records]
        self._splits = [record.splits[name] for record in records]
        self._starts = np.cumsum([0, *(split.tokens for split in self._splits)])
        self._itemsize = np.dtype(dtype).itemsize
        self._masked = any("mask" in split.files for split in self._splits)

    def split(self, shard_tokens: int) -> SplitEntry:
        """Write the shards that are not there yet, then the document ends."""
        total = int(self._starts[-1])
        shards = [
            self._shard(number, start, min(start + shard_tokens, total))
            for number, start in enumerate(range(0, total, shard_tokens))
        ]
        return SplitEntry(
            tokens=total,
            documents=sum(split.documents for split in self._splits),
            text_bytes=sum(split.text_bytes for split in self._splits),
            shards=tuple(shard.tokens for shard in shards),
            document_ends=self._ends(),
            masks=tuple(shard.mask for shard in shards if shard.mask is not None),
        )

    def _shard(self, number: int, start: int, stop: int) -> _Shard:
        stem = f"{self._name}-{number:05d}"
        recorded = self._work.path / f"{stem}{RECORD}"
        if recorded.is_file():
            shard = _Shard.model_validate_json(recorded.read_text(encoding="utf-8"))
        else:
            tokens = self._copied(
                "bin", self._work.joined / f"{stem}.bin", start, stop, self._itemsize
            )
            mask = (
                self._copied("mask", self._work.joined / f"{stem}.mask.bin", start, stop, 1)
                if self._masked
                else None
            )
            shard = _Shard(tokens=tokens, mask=mask)
            sync(self._work.joined)
            write_text(recorded, shard.model_dump_json() + "\n")
        for split in self._splits[: int(np.searchsorted(self._starts[1:], stop, side="right"))]:
            for kind in ("bin", "mask"):
                if kind in split.files:
                    (self._work.ranges / split.files[kind].name).unlink(missing_ok=True)
        return shard

    def _copied(self, kind: str, target: Path, start: int, stop: int, itemsize: int) -> FileEntry:
        """Write the tokens from `start` up to `stop`, or their mask, to a file."""
        file = CheckedFile(target)
        try:
            first = int(np.searchsorted(self._starts[1:], start, side="right"))
            last = int(np.searchsorted(self._starts[1:], stop, side="left"))
            for index in range(first, min(last + 1, len(self._splits))):
                begins = int(self._starts[index])
                inside = slice(
                    max(start - begins, 0), min(stop - begins, self._splits[index].tokens)
                )
                if inside.start < inside.stop:
                    for begin, end in self._pieces(index, inside.start, inside.stop):
                        self._copy(index, kind, file, begin * itemsize, end * itemsize)
            return file.close()
        except BaseException:
            file.abandon()
            raise

    def _pieces(self, index: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield where in a range's files the tokens from `start` up to `stop` of those that stay
        are.
        """
        if self._dropped is None:
            yield start, stop
            return
        before = 0
        for begin, end in runs(
            read_ends(self._work, self._splits[index]),
            self._dropped.of(self._numbers[index], self._name),
        ):
            first, last = max(start - before, 0), min(stop - before, end - begin)
            if first < last:
                yield begin + first, begin + last
            before += end - begin

    def _copy(self, index: int, kind: str, target: CheckedFile, start: int, stop: int) -> None:
        """Append bytes of one of a range's files."""
        path = self._work.ranges / self._splits[index].files[kind].name
        try:
            with path.open("rb") as file:
                file.seek(start)
                while start < stop and (data := file.read(min(_COPIED, stop - start))):
                    target.write(np.frombuffer(data, np.uint8))
                    start += len(data)
        except FileNotFoundError:
            start = -1
        if start != stop:
            record_path(self._work.ranges, self._numbers[index]).unlink()
            raise _damaged(f"{path} was")

    def _ends(self) -> FileEntry:
        file = CheckedFile(self._work.joined / f"{self._name}-documents.bin")
        try:
            for start, number, split in zip(
                self._starts, self._numbers, self._splits, strict=False
            ):
                ends = read_ends(self._work, split)
                if self._dropped is not None:
                    ends = np.cumsum(
                        np.diff(ends, prepend=0)[~self._dropped.of(number, self._name)]
                    )
                file.write((ends + start).astype("<i8"))
            return file.close()
        except BaseException:
            file.abandon()
            raise
