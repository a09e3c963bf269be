"""Prepare a dataset: tokenise text once, in parallel, to the same bytes for any worker count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Unpack

from flatout.config.registry import unknown_name
from flatout.data.prepare.pack.range_files import (
    RangeRecord,
    count_skipped,
    no_documents,
    record_path,
)
from flatout.data.prepare.pack.tokenize import Packing, Report, Tally
from flatout.data.prepare.pack.work_items import WorkItem, WorkPlan
from flatout.data.prepare.plan.make import check_same, plan_work
from flatout.data.prepare.plan.work_dir import WorkDir, WorkPart
from flatout.data.prepare.request.options import NAMED
from flatout.data.prepare.request.options import Options as Options
from flatout.data.prepare.request.request import Access, Request, existing_dataset, open_request
from flatout.data.prepare.workers.local import LocalWorkers, Workers
from flatout.data.sources import CANNOT_BE_READ, ReadTask
from flatout.data.sources.files import advised
from flatout.data.sources.listing import first_changed
from flatout.data.sources.packed import NotHandedOut
from flatout.data.store.manifest import (
    SPLITS,
    Manifest,
    SkippedRows,
    StoredLocation,
)
from flatout.errors import DataError
from flatout.hardware.machine import cgroup_limits, usable_cores
from flatout.progress import Task
from flatout.storage.files import Unfinished, expanded
from flatout.storage.remote.connection import Unreachable
from flatout.storage.streams import shortened

BYTES_PER_WORKER = 8_000_000
"""Minimum text per worker: for less, one more process costs more than it saves."""
BAD_SHARE = 0.01
"""Default limit of bad rows, as a share of the rows so far, or BAD_ROWS if that is more."""
BAD_ROWS = 100
"""Number of bad rows that the default limit always allows."""
UNREAD_SHARE = 0.01
"""Maximum share of the text that may be damaged."""


@dataclass(frozen=True)
class Prepared:
    """A prepared dataset or a part of one, and how long it took."""

    path: Path
    """Its directory."""
    seconds: float
    manifest: Manifest | None
    """None while parts are packed."""
    existed: bool = False
    """Whether this dataset was already there."""
    records: Sequence[RangeRecord] = ()
    """Records of the ranges in this part."""
    left: int = 0
    """Ranges that no process has packed yet."""


Engine = Callable[[Request, int | None], AbstractContextManager[Workers]]
"""Provides workers for a request: the requested number, or the default."""


def engine_named(name: str) -> Engine:
    """Return the engine of this name: local or ray.

    Raises: ConfigError with the nearest name; MissingPackage when its package is not installed.
    """
    if name not in ("local", "ray"):
        raise unknown_name("engine", name, ("local", "ray"))
    if name == "local":
        return local
    from flatout.data.prepare.workers.ray import RayWorkers, ray_package

    ray_package()
    return lambda request, workers: RayWorkers(workers, progress=request.progress)


def local(request: Request, workers: int | None) -> AbstractContextManager[Workers]:
    """Return worker processes on this machine."""
    return LocalWorkers(workers or default_workers(request.corpus.all_read_tasks))


def prepare_dataset(
    sources: Sequence[str],
    out: Path,
    options: Options,
    *,
    part: WorkPart | None = None,
    join: bool = False,
    workers: int | None = None,
    engine: Engine = local,
    **access: Unpack[Access],
) -> Prepared:
    """Prepare the dataset of some sources in the directory `out`, completely or not at all.

    A directory that already contains this dataset is left unchanged. With `part`, pack only that
    part of it, while other processes pack the others. With `join`, publish what they have packed.

    Raises: DataError for unusable text, options, tokenizer or `out`, when another process packs the
            same, or naming the parts that are missing for `join`.
    """
    started = time.perf_counter()
    out = expanded(out)
    request = open_request(sources, out, options, **access)
    manifest = existing_dataset(out, request.source, request.progress)
    existed, left, records = manifest is not None, 0, list[RangeRecord]()
    work = WorkDir(out, part)
    if not existed or work.path.exists():
        with work:  # another process may have just finished the dataset
            manifest = existing_dataset(out, request.source, request.progress)
            existed = manifest is not None
            if existed:
                work.clear()
            elif part is not None:
                with engine(request, workers) as crew:
                    plan, packing = plan_work(work, request, crew.load)
                    own = [item for item in plan.items if part.has(item.number)]
                    records = _pack(work, plan, packing, own, crew, request)
                left = len(plan.items) - len(work.done())
            else:
                if join:
                    _require_parts(work, request)
                with engine(request, 1 if join else workers) as crew:
                    manifest = _write(work, request, crew)
    return Prepared(out, time.perf_counter() - started, manifest, existed, records, left)


def _require_parts(work: WorkDir, request: Request) -> None:
    """Check that all parts are done.

    Raises: DataError naming those that are missing.
    """
    stored = work.plan()
    if stored is None:
        raise DataError(
            f"No part of {work.out} is done.",
            fix="Do its parts first, with --part 1/N to --part N/N.",
        )
    check_same(work, stored, request)
    missing = sorted({item.number for item in stored.items} - work.done().keys())
    if missing:
        raise DataError(
            f"{len(missing)} of {len(stored.items)} ranges of {work.out} are not done"
            f"{work.parts_of(missing)}.",
            fix="Run those parts again, then --join.",
        )


def default_workers(tasks: Sequence[ReadTask]) -> int:
    """Return how many processes to use: one per usable core, fewer for little text."""
    sizes = [task.num_bytes for task in tasks]
    useful = len(sizes) if 0 in sizes else sum(sizes) // BYTES_PER_WORKER
    cores = min(usable_cores(), cgroup_limits()[0] or useful)
    return max(1, min(cores, useful))


def _write(work: WorkDir, request: Request, crew: Workers) -> Manifest:
    """Pack the remaining ranges, and publish all. Discard the work if a split is empty."""
    plan, packing = plan_work(work, request, crew.load)
    records = _pack(work, plan, packing, plan.items, crew, request)
    skipped: list[SkippedRows] = []
    for record in records:
        for rows in record.skipped:
            count_skipped(skipped, rows.reason, rows.first, rows.count)
    error = _empty_split(records, request, plan.rule, skipped)
    if error is not None:
        work.clear()
        raise error
    return work.publish(
        packing.tokenizer,
        chain.from_iterable(record.shards for record in records),
        source=request.source,
        split_rule=plan.rule,
        skipped=[rows.named() for rows in skipped],
        cut_documents=sum(record.cut_documents for record in records),
    )


def _pack(
    work: WorkDir,
    plan: WorkPlan,
    packing: Packing,
    wanted: Sequence[WorkItem],
    crew: Workers,
    request: Request,
) -> list[RangeRecord]:
    """Pack the `wanted` items that are not done, and return the records of all in order."""
    numbers = {item.number for item in wanted}
    done = {
        number: record
        for number, record in work.done().items()
        if number in numbers and not (record.bad_rows and request.options.on_bad_row == "raise")
    }
    work.require_files(done.values())
    left = [item for item in wanted if item.number not in done]
    if done:
        request.progress.say(f"{len(done)} of {len(wanted)} ranges are done. {len(left)} remain.")
    sizes = [task.num_bytes for item in left for task in item.read_tasks]
    total = sum(sizes) / 1e6 if all(sizes) else None
    limit = BadRowLimit(request.options.max_bad_rows, sum(item.num_bytes for item in plan.items))
    records: list[RangeRecord] = []
    try:
        with request.progress.task("Tokenising", total=total, unit="MB") as task:
            packed = crew.pack(left, packing, _reporter(task))
            for item in wanted:
                records.append(done[item.number] if item.number in done else next(packed))
                limit.add(records[-1])
        changed = first_changed(request.corpus.files)
        if changed is not None:
            for item in left:
                record_path(work.ranges, item.number).unlink(missing_ok=True)
            raise DataError(
                f"{changed} was changed or deleted while it was being prepared: the dataset would "
                "mix two versions of the text.",
                fix="Run the same command again once nothing writes to that file, or prepare a "
                "copy of it.",
            )
    except (Unfinished, NotHandedOut, Unreachable):  # the text is not at fault, so the work is kept
        raise
    except DataError as error:
        raise work.keep(advised(error, request.corpus.files)) from error
    return records


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
            raise DataError(
                f"{share:.1%} of the text is in damaged files, or damaged regions of files, and at "
                f"most {UNREAD_SHARE:.0%} may be: {shortened(self._damaged)}.",
                fix="Download these files again, remove them from the source, or decompress their "
                "readable part and use that instead.",
            )


def _reporter(task: Task) -> Report:
    """Return a function that shows progress: bytes, documents, tokens per second."""
    started = time.perf_counter()
    documents = tokens = 0

    def report(tally: Tally) -> None:
        nonlocal documents, tokens
        documents += tally.documents
        tokens += tally.tokens
        rate = tokens / max(time.perf_counter() - started, 1e-9)
        task.note(f"{documents:,} documents, {rate:,.0f} tokens/s")
        task.advance(tally.num_bytes / 1e6)

    return report


def _empty_split(
    records: Sequence[RangeRecord], request: Request, rule: str, skipped: Iterable[SkippedRows]
) -> DataError | None:
    """Return the error for a split without documents, which names a rule that works, or None."""
    train, val = (sum(record.splits[name].documents for record in records) for name in SPLITS)
    names = " ".join(request.source["names"])
    if train and val:
        return None
    if not train and (rule == NAMED or not val):
        return no_documents(names, skipped)
    if rule == NAMED:
        return no_documents(" ".join(request.source["val"]))
    return DataError(
        f"{names}: the split rule {rule!r} leaves none of the {train + val:,} documents for "
        f"{'validation' if train else 'training'}.",
        fix="Set --split 'tail 0.1'.",
    )
