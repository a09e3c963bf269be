"""Join packed ranges into a dataset, in shards of 128 MiB.

Shard boundaries depend on the tokens alone, so the bytes are the same however the work is divided.
Once a shard is recorded as complete, the ranges inside it are removed: joining needs space for one
shard more than the tokens, and resumes where it was killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from flatout.data.prepare.pack.range_files import (
    RECORD,
    RangeRecord,
    RangeSplit,
    read_stored,
    record_path,
)
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
from flatout.data.tokenizers import Tokenizer, stored_files
from flatout.storage.files import (
    CheckedFile,
    Stored,
    Unfinished,
    check_blocks,
    entry_of,
    sync,
    write_text,
    write_whole,
    writing,
)
from flatout.storage.json_io import JsonObject

COPIED = 1 << 20
"""Tokens copied at a time."""

Span = tuple[int, RangeSplit, int, int]
"""The tokens [start, stop) in the files of a range: its number, its split, start and stop."""


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
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Join all ranges in order into the dataset, publish it, and return its manifest.

    Check the files of ranges that another process wrote first (`check_files`).

    Raises: Unfinished when the disk is full.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    shard_tokens = max(shard_bytes // np.dtype(dtype).itemsize, 1)
    with writing(work.out):
        work.joined.mkdir(exist_ok=True)
        splits = {name: _join_split(work, name, records, dtype, shard_tokens) for name in SPLITS}
        tokenizer.save(work.joined / TOKENIZER)
        sync(work.joined / TOKENIZER)
        manifest = Manifest(
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            tokenizer=TokenizerEntry(
                name=tokenizer.name,
                digest=tokenizer.digest(),
                files=tuple(map(entry_of, stored_files(work.joined / TOKENIZER))),
            ),
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


def _join_split(
    work: WorkDir,
    name: SplitName,
    records: Sequence[RangeRecord],
    dtype: str,
    shard_tokens: int,
) -> SplitEntry:
    """Write the document ends of a split, and the shards that are missing."""
    splits = {record.number: record.splits[name] for record in records}
    kinds = {"bin": np.dtype(dtype).newbyteorder("<")}
    if any("mask" in split.files for split in splits.values()):
        kinds["mask"] = np.dtype(np.uint8)
    start = 0
    with CheckedFile(work.joined / f"{name}-documents.bin") as file:
        for split in splits.values():
            file.write((split.ends(work.ranges) + start).astype("<i8"))
            start += split.tokens
    shards = []
    for index, inside in enumerate(_divided(splits, shard_tokens)):
        stem = f"{name}-{index:05d}"
        record = work.path / f"{stem}{RECORD}"
        if record.is_file():
            shards.append(read_stored(record, _Shard, work_dir=work.path))
        else:
            files = {kind: _write_shard(work, stem, kind, kinds[kind], inside) for kind in kinds}
            shards.append(_Shard(tokens=files["bin"], mask=files.get("mask")))
            sync(work.joined)
            write_text(record, shards[-1].model_dump_json() + "\n")
        for _, split, _, stop in inside:
            if stop == split.tokens:
                for kind in kinds:
                    (work.ranges / split.files[kind].name).unlink(missing_ok=True)
    return SplitEntry(
        tokens=start,
        documents=sum(split.documents for split in splits.values()),
        text_bytes=sum(split.text_bytes for split in splits.values()),
        shards=tuple(shard.tokens for shard in shards),
        document_ends=file.close(),
        masks=tuple(shard.mask for shard in shards if shard.mask is not None),
    )


def _divided(splits: Mapping[int, RangeSplit], size: int) -> Iterator[list[Span]]:
    """Divide the tokens of ranges into lists of `size` tokens. The last may have fewer."""
    inside: list[Span] = []
    room = size
    for number, split in splits.items():
        start = 0
        while start < split.tokens:
            end = min(start + room, split.tokens)
            inside.append((number, split, start, end))
            room -= end - start
            start = end
            if not room:
                yield inside
                inside, room = [], size
    if inside:
        yield inside


def _write_shard(
    work: WorkDir, stem: str, kind: str, dtype: np.dtype[np.generic], spans: Iterable[Span]
) -> FileEntry:
    """Write the tokens of some spans, or their mask, to a file."""
    name = f"{stem}.bin" if kind == "bin" else f"{stem}.{kind}.bin"
    with CheckedFile(work.joined / name) as file:
        for number, split, start, stop in spans:
            path: Path = work.ranges / split.files[kind].name
            for first in range(start, stop, COPIED):
                count, items = min(COPIED, stop - first), np.empty(0, dtype)
                if path.exists():
                    items = np.fromfile(path, dtype, count, offset=first * dtype.itemsize)
                if len(items) < count:
                    record_path(work.ranges, number).unlink()
                    raise _damaged(f"{path} was")
                file.write(items)
    return file.close()
