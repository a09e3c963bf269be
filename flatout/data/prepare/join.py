"""Join packed ranges into a dataset: without duplicates if asked to, in shards of 128 MiB.

Shard boundaries depend on the tokens alone, so the bytes are the same however the work is divided.
Once a shard is recorded as complete, the ranges inside it are removed: joining needs space for one
shard more than the tokens, and resumes where it was killed.

Of equal documents the first is kept, training before validation, so that no validation document is
also trained on. Separate validation text is kept complete: training drops the documents that both
contain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from flatout.data.prepare.pack.range_files import (
    RECORD,
    RangeRecord,
    RangeSplit,
    read_stored,
    record_path,
)
from flatout.data.prepare.pack.work_items import WorkPlan
from flatout.data.prepare.plan.make import SHARD_BYTES
from flatout.data.prepare.plan.work_dir import WorkDir
from flatout.data.prepare.request.options import NAMED
from flatout.data.sources import FIRST_NAMED, Document, Location
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
from flatout.storage.files import (
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
from flatout.storage.json_io import JsonObject

SORTED_AT_ONCE = 1 << 23
"""Approximate number of hashes of documents that are sorted in memory, in 400 MB."""

COPIED = 1 << 20
"""Tokens copied at a time."""

Dropped = dict[tuple[int, SplitName], Array]
"""A flag per document of each range's split: True if it is omitted."""
Span = tuple[int, RangeSplit, int, int]
"""The tokens [start, stop) in the files of a range: its number, its split, start and stop."""


class _Shard(Stored):
    """The record of a complete shard."""

    tokens: FileEntry
    mask: FileEntry | None


def find_duplicates(work: WorkDir, records: Sequence[RangeRecord], plan: WorkPlan) -> Dropped:
    """Return the documents that repeat an earlier one, over all ranges in order.

    Hashes are sorted in several passes over the files, each for its share of the hashes.
    """
    kept: SplitName | None = "val" if plan.rule == NAMED else None
    splits = {
        (record.number, name): record.splits[name]
        for name in sorted(SPLITS, key=lambda name: name != kept)
        for record in records
    }
    ends = np.cumsum([split.documents for split in splits.values()])
    flags = np.zeros(ends[-1], np.bool_)
    passes = len(flags) // SORTED_AT_ONCE + 1
    for share in range(passes):
        hashes, documents = [], []
        for split, end in zip(splits.values(), ends, strict=True):
            found = split.read(work.ranges, "marks")["hash"]
            chosen = np.flatnonzero(found[:, 0] % passes == share)
            hashes.append(found[chosen])
            documents.append(end - len(found) + chosen)
        sorted_hashes = np.concatenate(hashes)
        order = np.lexsort(sorted_hashes.T)  # stable: equal hashes stay in order
        sorted_hashes = sorted_hashes[order]
        again = np.flatnonzero((sorted_hashes[1:] == sorted_hashes[:-1]).all(axis=1)) + 1
        flags[np.concatenate(documents)[order[again]]] = True
    dropped = dict(zip(splits, np.split(flags, ends[:-1]), strict=True))
    for (_, name), own in dropped.items():
        own[:] &= name != kept
    return dropped


def without_dropped(
    work: WorkDir, records: Sequence[RangeRecord], dropped: Dropped
) -> list[RangeRecord]:
    """Return the records with the counts of the remaining documents."""
    remaining = []
    for record in records:
        splits = {}
        for name, split in record.splits.items():
            keep = ~dropped[record.number, name]
            lengths = np.diff(split.read(work.ranges, "ends"), prepend=0)
            sizes = split.read(work.ranges, "marks")["text_bytes"]
            counts = {
                "tokens": int(lengths[keep].sum()),
                "documents": int(keep.sum()),
                "text_bytes": int(sizes[keep].sum()),
            }
            splits[name] = split.model_copy(update=counts)
        is_cut = (
            record.cut_documents
            and not dropped[record.number, "train"][-1]
            and not dropped[record.number, "val"][0]
        )
        update = {"splits": splits, "cut_documents": int(is_cut)}
        remaining.append(record.model_copy(update=update))
    return remaining


def first_dropped(plan: WorkPlan, dropped: Dropped) -> list[Location]:
    """Return the locations of the first dropped documents, reading their ranges again.

    A range with a document that could not be tokenised is skipped: its flags do not line up with
    the documents read.
    """
    found: list[Location] = []
    for item in plan.items:
        flags = {name: dropped[item.number, name] for name in SPLITS}
        if not any(flag.any() for flag in flags.values()):
            continue
        inside: list[Location] = []
        counts = dict.fromkeys(SPLITS, 0)
        rows = (row for task in item.read_tasks for row in task.rows())
        documents = (row for row in rows if isinstance(row, Document))
        for index, row in enumerate(documents, item.first):
            for name, _ in item.assignment.assign(row.text, index):
                if flags[name][counts[name] : counts[name] + 1].any() and len(inside) < FIRST_NAMED:
                    inside.append(row.location)
                counts[name] += 1
        if all(counts[name] == len(flags[name]) for name in SPLITS):
            found += inside
        if len(found) >= FIRST_NAMED:
            break
    return found[:FIRST_NAMED]


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

    Documents in `dropped` are omitted, and `records` must not count them. Check the files of
    ranges that another process wrote first (`check_files`).

    Raises: Unfinished when the disk is full.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    shard_tokens = max(shard_bytes // np.dtype(dtype).itemsize, 1)
    with writing(work.out):
        work.joined.mkdir(exist_ok=True)
        splits = {
            name: _join_split(work, name, records, dtype, shard_tokens, dropped) for name in SPLITS
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


def _join_split(
    work: WorkDir,
    name: SplitName,
    records: Sequence[RangeRecord],
    dtype: str,
    shard_tokens: int,
    dropped: Dropped | None,
) -> SplitEntry:
    """Write the document ends of a split, and the shards that are missing."""
    splits = {record.number: record.splits[name] for record in records}
    kinds = {"bin": np.dtype(dtype).newbyteorder("<")}
    if any("mask" in split.files for split in splits.values()):
        kinds["mask"] = np.dtype(np.uint8)
    last: dict[int, int] = {}
    """Where the last span of a range stops, from its first span on."""

    def spans() -> Iterator[Span]:
        for number, split in splits.items():
            kept = [(0, split.tokens)]
            if dropped is not None:
                kept = runs(split.read(work.ranges, "ends"), dropped[number, name])
            for first, stop in kept:
                last[number] = kept[-1][1]
                yield number, split, first, stop

    start = 0
    with CheckedFile(work.joined / f"{name}-documents.bin") as file:
        for number, split in splits.items():
            ends = split.read(work.ranges, "ends")
            if dropped is not None:
                ends = np.cumsum(np.diff(ends, prepend=0)[~dropped[number, name]])
            file.write((ends + start).astype("<i8"))
            start += split.tokens
    shards = []
    for index, inside in enumerate(_divided(spans(), shard_tokens)):
        stem = f"{name}-{index:05d}"
        record = work.path / f"{stem}{RECORD}"
        if record.is_file():
            shards.append(read_stored(record, _Shard, work_dir=work.path))
        else:
            files = {kind: _write_shard(work, stem, kind, kinds[kind], inside) for kind in kinds}
            shards.append(_Shard(tokens=files["bin"], mask=files.get("mask")))
            sync(work.joined)
            write_text(record, shards[-1].model_dump_json() + "\n")
        for number, split, _, stop in inside:
            if stop == last[number]:
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


def runs(ends: Array, drops: Array) -> list[tuple[int, int]]:
    """Return the [start, stop) spans of tokens to keep, with adjacent documents merged.

    Shapes:  ends (documents,), drops (documents,) bool.
    """
    edges = np.flatnonzero(np.diff(~drops, prepend=False, append=False))
    bounds = np.concatenate([[0], ends])[edges]
    return [(first, last) for first, last in bounds.reshape(-1, 2).tolist()]


def _divided(spans: Iterable[Span], size: int) -> Iterator[list[Span]]:
    """Divide spans into lists of `size` tokens. The last may have fewer."""
    inside: list[Span] = []
    room = size
    for number, split, start, stop in spans:
        while start < stop:
            end = min(start + room, stop)
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
