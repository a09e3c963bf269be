"""Join ranges into a dataset: their tokens in order, in shards of 128 MiB.

Shard boundaries depend on the tokens alone, so the bytes are the same however the work is divided.
Once a shard is recorded as complete, the ranges inside it are removed: joining needs space for one
shard more than the tokens, and resumes where it was killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from flatout.data.prepare.join.duplicates import Dropped
from flatout.data.prepare.pack.range_files import RECORD, RangeRecord, read_stored, record_path
from flatout.data.prepare.plan.make import SHARD_BYTES
from flatout.data.prepare.plan.work_dir import WorkDir
from flatout.data.store.manifest import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    FileEntry,
    Manifest,
    SkippedRows,
    SplitEntry,
    SplitName,
    TokenizerEntry,
    token_dtype,
)
from flatout.data.tokenizers import Tokenizer
from flatout.files import (
    Array,
    CheckedFile,
    Stored,
    Unfinished,
    check_blocks,
    sync,
    write_text,
    write_whole,
    writing,
)
from flatout.json_io import JsonObject

_COPIED = 4 << 20
"""Bytes copied at a time."""


class _Shard(Stored):
    """The record of a complete shard."""

    tokens: FileEntry
    mask: FileEntry | None


def join(
    work: WorkDir,
    records: Sequence[RangeRecord],
    tokenizer: Tokenizer,
    *,
    source: JsonObject,
    split_rule: str,
    skipped: Sequence[SkippedRows] = (),
    dropped: Dropped | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Join all ranges in order into the dataset, publish it, and return its manifest.

    Documents in `dropped` are left out, and `records` must not count them. Check the files of
    ranges that another process wrote first (`check_files`).

    Raises: Unfinished when the disk is full.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    shard_tokens = max(shard_bytes // np.dtype(dtype).itemsize, 1)
    with writing(work.out):
        work.joined.mkdir(exist_ok=True)
        splits = {
            name: _SplitJoiner(work, name, records, dtype, dropped).join(shard_tokens)
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
    work.publish()
    return manifest


def check_files(work: WorkDir, records: Sequence[RangeRecord]) -> None:
    """Check the files of some ranges, and remove the records of damaged ones.

    Ranges without a record are packed again. Missing files are ignored: their tokens may already be
    in a shard.

    Raises: Unfinished with the number of damaged ranges.
    """
    damaged = 0
    for record in records:
        entries = (entry for split in record.splits.values() for entry in split.files.values())
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
        fix="Run the same command again: it packs them again, and keeps the rest.",
    )


class _SplitJoiner:
    """Joins one split."""

    def __init__(
        self,
        work: WorkDir,
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
        self._itemsizes = {"bin": np.dtype(dtype).itemsize}
        if any("mask" in split.files for split in self._splits):
            self._itemsizes["mask"] = 1

    def join(self, shard_tokens: int) -> SplitEntry:
        """Write the shards that are missing, then the document ends, and return the entry."""
        total = int(self._starts[-1])
        shards = [
            self._shard(number, start, min(start + shard_tokens, total))
            for number, start in enumerate(range(0, total, shard_tokens))
        ]
        with CheckedFile(self._work.joined / f"{self._name}-documents.bin") as file:
            for start, number, split in zip(
                self._starts, self._numbers, self._splits, strict=False
            ):
                ends = split.read(self._work.ranges, "ends")
                if self._dropped is not None:
                    keep = ~self._dropped[number, self._name]
                    ends = np.cumsum(np.diff(ends, prepend=0)[keep])
                file.write((ends + start).astype("<i8"))
        return SplitEntry(
            tokens=total,
            documents=sum(split.documents for split in self._splits),
            text_bytes=sum(split.text_bytes for split in self._splits),
            shards=tuple(shard.tokens for shard in shards),
            document_ends=file.close(),
            masks=tuple(shard.mask for shard in shards if shard.mask is not None),
        )

    def _shard(self, number: int, start: int, stop: int) -> _Shard:
        stem = f"{self._name}-{number:05d}"
        record = self._work.path / f"{stem}{RECORD}"
        if record.is_file():
            shard = read_stored(record, _Shard, work_dir=self._work.path)
        else:
            files = {kind: self._write_shard(kind, stem, start, stop) for kind in self._itemsizes}
            shard = _Shard(tokens=files["bin"], mask=files.get("mask"))
            sync(self._work.joined)
            write_text(record, shard.model_dump_json() + "\n")
        for split in self._splits[: int(np.searchsorted(self._starts[1:], stop, side="right"))]:
            for kind in self._itemsizes:
                if kind in split.files:
                    (self._work.ranges / split.files[kind].name).unlink(missing_ok=True)
        return shard

    def _write_shard(self, kind: str, stem: str, start: int, stop: int) -> FileEntry:
        """Write the tokens from `start` up to `stop`, or their mask, to a file."""
        suffix = "bin" if kind == "bin" else f"{kind}.bin"
        with CheckedFile(self._work.joined / f"{stem}.{suffix}") as file:
            first = int(np.searchsorted(self._starts[1:], start, side="right"))
            last = int(np.searchsorted(self._starts[1:], stop, side="left"))
            for index in range(first, min(last + 1, len(self._splits))):
                offset = int(self._starts[index])
                for begin, end in self._kept(index, start - offset, stop - offset):
                    self._copy(index, kind, file, begin, end)
        return file.close()

    def _kept(self, index: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the spans in a range's files of its remaining tokens from `start` up to `stop`."""
        spans = [(0, self._splits[index].tokens)]
        if self._dropped is not None:
            ends = self._splits[index].read(self._work.ranges, "ends")
            spans = runs(ends, self._dropped[self._numbers[index], self._name])
        before = 0
        for begin, end in spans:
            first, last = max(start - before, 0), min(stop - before, end - begin)
            if first < last:
                yield begin + first, begin + last
            before += end - begin

    def _copy(self, index: int, kind: str, target: CheckedFile, start: int, stop: int) -> None:
        """Append the items from `start` up to `stop` of one of a range's files."""
        path = self._work.ranges / self._splits[index].files[kind].name
        position, end = start * self._itemsizes[kind], stop * self._itemsizes[kind]
        try:
            with path.open("rb") as file:
                file.seek(position)
                while position < end and (data := file.read(min(_COPIED, end - position))):
                    target.write(np.frombuffer(data, np.uint8))
                    position += len(data)
        except FileNotFoundError:
            position = -1
        if position != end:
            record_path(self._work.ranges, self._numbers[index]).unlink()
            raise _damaged(f"{path} was")


def runs(ends: Array, drops: Array) -> list[tuple[int, int]]:
    """Return the [start, stop) spans of tokens to keep, with adjacent documents merged.

    Shapes:  ends (documents,), drops (documents,) bool.
    """
    merged: list[tuple[int, int]] = []
    if not drops.all():
        starts = np.concatenate([[0], ends[:-1]])[~drops]
        stops = ends[~drops]
        first = np.concatenate([[True], starts[1:] != stops[:-1]])
        last = np.concatenate([first[1:], [True]])
        merged = list(zip(starts[first].tolist(), stops[last].tolist(), strict=True))
    return merged
