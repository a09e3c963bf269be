"""Find duplicate documents by a hash of their text, in bounded memory.

A range packed with `--duplicates drop` has a mark per document: its hash and size. Marks are
distributed by hash over files of about a million each, and each file is sorted separately.

Of equal documents the first is kept, training before validation, so that no validation document is
also trained on. Separate validation text is kept complete: training drops the documents that both
contain.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatout.data.prepare.pack.range_files import RangeRecord
from flatout.data.prepare.pack.work_items import WorkPlan
from flatout.data.prepare.plan.work_dir import WorkDir
from flatout.data.prepare.request.options import NAMED
from flatout.data.store.manifest import SPLITS, SplitName
from flatout.files import Array, writing
from flatout.sources import FIRST_NAMED, Document, RowLocation

ZEROS_AT_ONCE = 1 << 20
SORTED_AT_ONCE = 1 << 20
"""Approximate number of marks that are sorted in memory."""

_SORTED = np.dtype([("hash", "<u8", 2), ("document", "<i8")])


Dropped = dict[tuple[int, SplitName], Array]
"""A flag per document of each range's split: True if it is left out."""


def find_duplicates(work: WorkDir, records: Sequence[RangeRecord], plan: WorkPlan) -> Dropped:
    """Return the documents that repeat an earlier one, over all ranges in order.

    Separate validation text comes first and keeps its own duplicates.
    """
    kept: SplitName | None = "val" if plan.rule == NAMED else None
    spans: dict[tuple[int, SplitName], slice] = {}
    total = 0
    for name in sorted(SPLITS, key=lambda name: name != kept):
        for record in records:
            spans[record.number, name] = slice(total, total + record.splits[name].documents)
            total = spans[record.number, name].stop
    folder = work.path / "duplicates"
    with writing(work.out):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        flags = _flags(folder / "flags", total)
        dropped = {key: flags[span] for key, span in spans.items()}
        paths = [folder / f"marks-{index}" for index in range(total // SORTED_AT_ONCE + 1)]
        for record in records:
            for name, split in record.splits.items():
                marks = split.read(work.ranges, "marks")
                sortable = np.empty(len(marks), _SORTED)
                sortable["hash"] = marks["hash"]
                sortable["document"] = np.arange(len(marks)) + spans[record.number, name].start
                target = sortable["hash"][:, 0] % len(paths)
                for index in np.unique(target):
                    with paths[index].open("ab") as file:
                        file.write(sortable[target == index].tobytes())
        for path in filter(Path.exists, paths):
            marks = np.fromfile(path, _SORTED)
            order = np.lexsort((marks["document"], marks["hash"][:, 1], marks["hash"][:, 0]))
            hashes = marks["hash"][order]
            again = np.flatnonzero((hashes[1:] == hashes[:-1]).all(axis=1)) + 1
            flags[marks["document"][order[again]]] = True
            path.unlink()
        if kept is not None:
            for record in records:
                dropped[record.number, kept][:] = False
        return dropped


def _flags(path: Path, total: int) -> Array:
    """Return a flag per document, all False, in a memory-mapped file."""
    size = max(total, 1)
    with path.open("wb") as file:  # a full disk raises here; a write to the map kills the process
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:  # macOS
            for start in range(0, size, ZEROS_AT_ONCE):
                file.write(bytes(min(ZEROS_AT_ONCE, size - start)))
    return np.asarray(np.memmap(path, np.bool_, "r+", shape=size)[:total])


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


def first_dropped(plan: WorkPlan, dropped: Dropped) -> list[RowLocation]:
    """Return the locations of the first dropped documents, reading their ranges again.

    A range with a document that could not be tokenised is skipped: its flags do not line up with
    the documents read.
    """
    found: list[RowLocation] = []
    for item in plan.items:
        flags = {name: dropped[item.number, name] for name in SPLITS}
        if not any(flag.any() for flag in flags.values()):
            continue
        inside: list[RowLocation] = []
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
