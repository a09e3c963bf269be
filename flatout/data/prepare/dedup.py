"""Documents that are there twice: found by a hash of their text, in memory that does not grow with
the corpus.

Each range that is packed with `--duplicates drop` has marks: of every document a hash and its size.
Marks go to files by their hash, a million or so each, and each file is sorted alone. Of equal
documents the first of the corpus stays: training before validation, so that nothing is validated on
that was trained on. Where validation is text of its own, it stays as it is, and training loses what
it has too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from flatout.data.prepare.ranges import Range, RangeRecord, RangeSplit
from flatout.data.prepare.tokenize import MARK, Assignment
from flatout.data.prepare.work_dir import WorkFolder
from flatout.data.store.manifest import SPLITS, SplitName
from flatout.files import writing
from flatout.sources import FIRST_NAMED, Document, RowLocation

Array = np.ndarray[Any, np.dtype[Any]]

ZEROS_AT_ONCE = 1 << 20
SORTED_AT_ONCE = 1 << 20
"""About how many marks are sorted in memory."""

_SORTED = np.dtype([("hash", "<u8", 2), ("document", "<i8")])


class Dropped:
    """Which documents of which range are left out."""

    def __init__(self, flags: Array, places: dict[tuple[int, SplitName], slice]) -> None:
        self._flags = flags
        self._places = places

    def of(self, number: int, name: SplitName) -> Array:
        """Return True for each document of a split of a range that is left out.

        Shapes:  returns (documents,) bool.
        """
        drops: Array = self._flags[self._places[number, name]] != 0
        return drops

    @property
    def count(self) -> int:
        """How many are left out."""
        return int(self._flags.sum(dtype=np.int64))


def find_duplicates(
    work: WorkFolder, records: Sequence[RangeRecord], *, kept: SplitName | None = None
) -> Dropped:
    """Return which documents of all ranges, in order, were there before; of the split that is
    `kept` as it is, none.
    """
    places: dict[tuple[int, SplitName], slice] = {}
    total = 0
    for name in sorted(SPLITS, key=lambda name: name != kept):
        for record in records:
            places[record.number, name] = slice(total, total + record.splits[name].documents)
            total += record.splits[name].documents
    folder = work.path / "duplicates"
    with writing(work.out):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        flags = _flags(work, records, places, folder, total)
        if kept is not None:
            for record in records:
                flags[places[record.number, kept]] = 0
        return Dropped(flags, places)


def _flags(
    work: WorkFolder,
    records: Sequence[RangeRecord],
    places: dict[tuple[int, SplitName], slice],
    folder: Path,
    total: int,
) -> Array:
    """Return 1 for each document of the corpus that was there before, on the disk."""
    with (folder / "flags").open("wb") as file:
        _allocate(
            file, max(total, 1)
        )  # a full disk says so here; written through the map, it kills the process
    flags = np.memmap(folder / "flags", np.uint8, "r+", shape=max(total, 1))[:total]
    for path in _sorted_out(work, records, places, folder, -(-total // SORTED_AT_ONCE)):
        marks = np.fromfile(path, _SORTED)
        order = np.lexsort((marks["document"], marks["hash"][:, 1], marks["hash"][:, 0]))
        hashes = marks["hash"][order]
        again = np.flatnonzero((hashes[1:] == hashes[:-1]).all(axis=1)) + 1
        flags[marks["document"][order[again]]] = 1
        path.unlink()
    return flags


def _allocate(file: IO[bytes], size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, ZEROS_AT_ONCE):  # macOS
        file.write(bytes(min(ZEROS_AT_ONCE, size - start)))


def _sorted_out(
    work: WorkFolder,
    records: Sequence[RangeRecord],
    places: dict[tuple[int, SplitName], slice],
    folder: Path,
    count: int,
) -> Iterator[Path]:
    """Write the marks of all ranges to `count` files by their hash, and yield the files."""
    paths = [folder / f"marks-{number}" for number in range(max(count, 1))]
    for record in records:
        for name in SPLITS:
            marks = read_marks(work, record, name)
            sortable = np.empty(len(marks), _SORTED)
            sortable["hash"] = marks["hash"]
            sortable["document"] = np.arange(len(marks)) + places[record.number, name].start
            target = sortable["hash"][:, 0] % len(paths)
            for number in np.unique(target):
                with paths[number].open("ab") as file:
                    file.write(sortable[target == number].tobytes())
    return (path for path in paths if path.exists())


def read_marks(work: WorkFolder, record: RangeRecord, name: SplitName) -> Array:
    """Return the marks of a split of a range.

    Shapes:  returns (documents,) of MARK.
    """
    files = record.splits[name].files
    return (
        np.fromfile(work.ranges / files["marks"].name, MARK)
        if "marks" in files
        else np.empty(0, MARK)
    )


def without(
    work: WorkFolder, records: Sequence[RangeRecord], dropped: Dropped
) -> list[RangeRecord]:
    """Return the records with the counts that are left."""
    left = []
    for record in records:
        splits = {}
        for name, split in record.splits.items():
            drops = dropped.of(record.number, name)
            lengths = np.diff(read_ends(work, split), prepend=0)
            sizes = read_marks(work, record, name)["text_bytes"]
            counts = {
                "tokens": int(lengths[~drops].sum()),
                "documents": int((~drops).sum()),
                "text_bytes": int(sizes[~drops].sum()),
            }
            splits[name] = split.model_copy(update=counts)
        cut = (
            record.cut_documents
            and not dropped.of(record.number, "train")[-1]
            and not dropped.of(record.number, "val")[0]
        )
        left.append(record.model_copy(update={"splits": splits, "cut_documents": int(cut)}))
    return left


def where_dropped(
    ranges: Sequence[Range], assignment: Assignment, dropped: Dropped
) -> list[RowLocation]:
    """Return where the first documents that are left out are, in the order of the corpus. Their
    ranges are read again for it.

    A range in which a document could not be tokenised is passed over: the others cannot be counted
    off.
    """
    named: list[RowLocation] = []
    for work in ranges:
        drops = {name: dropped.of(work.number, name) for name in SPLITS}
        if any(drop.any() for drop in drops.values()):
            named += _where(work, assignment, drops)
        if len(named) >= FIRST_NAMED:
            break
    return named[:FIRST_NAMED]


def _where(
    work: Range, assignment: Assignment, drops: Mapping[SplitName, Array]
) -> list[RowLocation]:
    found: list[RowLocation] = []
    counts = dict.fromkeys(SPLITS, 0)
    for job in work.jobs:
        documents = (row for row in job.rows() if isinstance(row, Document))
        for ordinal, row in enumerate(documents, job.first):
            for name, _ in (job.assignment or assignment).pieces(row.text, ordinal):
                if drops[name][counts[name] : counts[name] + 1].any() and len(found) < FIRST_NAMED:
                    found.append(row.location)
                counts[name] += 1
    return found if all(counts[name] == len(drops[name]) for name in SPLITS) else []


def read_ends(work: WorkFolder, split: RangeSplit) -> Array:
    """Return the position after each document's last token, counted from the range's first.

    Shapes:  returns (documents,).
    """
    return (
        np.fromfile(work.ranges / split.files["ends"].name, "<i8")
        if "ends" in split.files
        else np.empty(0, "<i8")
    )


def runs(ends: Array, drops: Array) -> list[tuple[int, int]]:
    """Return [start, stop) of the tokens that stay, neighbours joined.

    Shapes:  ends (documents,), drops (documents,) bool.
    """
    starts = np.concatenate([[0], ends[:-1]])[~drops]
    stops = ends[~drops]
    begins = (
        np.flatnonzero(np.concatenate([[True], starts[1:] != stops[:-1]]))
        if len(starts)
        else np.empty(0, int)
    )
    closes = np.append(begins[1:] - 1, len(stops) - 1) if len(starts) else begins
    return list(zip(starts[begins].tolist(), stops[closes].tolist(), strict=True))
