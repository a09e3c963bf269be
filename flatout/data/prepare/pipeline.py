"""Prepare a dataset: tokenise text once, in parallel, to the same bytes for any worker count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from flatout.data.prepare.join.duplicates import find_duplicates, first_dropped, without_dropped
from flatout.data.prepare.join.shards import check_files, join
from flatout.data.prepare.pack.jobs import Range
from flatout.data.prepare.pack.records import RangeRecord, count_skipped, no_documents, record_path
from flatout.data.prepare.pack.tokenize import Packing, Report, Tally
from flatout.data.prepare.plan.limits import BadRowLimit
from flatout.data.prepare.plan.make import check_same, plan_work
from flatout.data.prepare.plan.work_dir import WorkDir, WorkPart
from flatout.data.prepare.plan.work_plan import WorkPlan
from flatout.data.prepare.request.inputs import require_unchanged
from flatout.data.prepare.request.options import NAMED
from flatout.data.prepare.request.options import Options as Options
from flatout.data.prepare.request.request import Access, Request, existing_dataset, open_request
from flatout.data.prepare.workers.local import LocalWorkers, Setup, Workers
from flatout.data.store.manifest import SPLITS, Manifest, SkippedRows
from flatout.errors import DataError
from flatout.files import Unfinished, expanded
from flatout.hardware import cgroup_limits, usable_cores
from flatout.progress import Task
from flatout.registry import unknown_name
from flatout.remote.connection import Unreachable
from flatout.sources import ReadTask
from flatout.sources.packed import NotHandedOut

BYTES_PER_WORKER = 8_000_000
"""Minimum text per worker: for less, another process costs more than it saves."""


@dataclass(frozen=True)
class Prepared:
    """A prepared dataset, and how long it took."""

    path: Path | str
    """Its directory or URL."""
    manifest: Manifest
    seconds: float
    existed: bool
    """Whether this dataset was already there."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens divided by that time; 0 when the dataset was already there."""
        return 0.0 if self.existed else round(self.manifest.tokens / self.seconds, 1)


@dataclass(frozen=True)
class PreparedPart:
    """One process's part of a dataset, and how much is left for others."""

    path: Path
    records: tuple[RangeRecord, ...]
    """Records of the ranges in this part."""
    left: int
    """Ranges that no process has packed yet."""
    seconds: float


Engine = Callable[[Request, int | None], AbstractContextManager[Workers]]
"""Provides workers for a request: the requested number, or the default."""


def engine_named(name: str) -> Engine:
    """Return the engine of this name: local or ray.

    Raises: ConfigError with the nearest name; MissingPackage when its package is not installed.
    """
    if name not in ("local", "ray"):
        raise unknown_name("engine", name, ("local", "ray"))
    return local if name == "local" else _ray_engine()


def local(request: Request, workers: int | None) -> AbstractContextManager[Workers]:
    """Return worker processes on this machine."""
    return LocalWorkers(workers or default_workers(request.corpus.all_read_tasks))


def _ray_engine() -> Engine:
    from flatout.data.prepare.workers.ray import RayWorkers, ray_package

    ray_package()
    return lambda request, workers: RayWorkers(workers, progress=request.progress)


def prepare_dataset(
    sources: Sequence[str],
    out: Path,
    options: Options,
    *,
    workers: int | None = None,
    engine: Engine = local,
    **access: Unpack[Access],
) -> Prepared:
    """Prepare the dataset of some sources in the directory `out`, completely or not at all.

    A directory that already contains this dataset is left unchanged.

    Raises: DataError for unusable text, options, tokenizer or `out`.
    """
    started = time.perf_counter()
    out = expanded(out)
    request = open_request(sources, out, options, **access)
    manifest, existed = prepare_request(request, out, workers, engine)
    return Prepared(out, manifest, time.perf_counter() - started, existed)


def prepare_request(
    request: Request, out: Path, workers: int | None, engine: Engine
) -> tuple[Manifest, bool]:
    """Prepare the dataset of a request as `prepare_dataset` does; return whether it existed."""
    with WorkDir(out) as work:
        manifest = _existing_or_claimed(request, work)
        if manifest is not None:
            return manifest, True
        with engine(request, workers) as crew:
            return _write(work, request, crew), False


def prepare_part(
    sources: Sequence[str],
    out: Path,
    options: Options,
    part: WorkPart,
    *,
    workers: int | None = None,
    **access: Unpack[Access],
) -> PreparedPart:
    """Pack one part of the dataset `out`, while other processes pack the others.

    Raises: DataError as `prepare_dataset` does, and when another process is packing this part.
    """
    started = time.perf_counter()
    out = expanded(out)
    request = open_request(sources, out, options, **access)
    records: list[RangeRecord] = []
    left = 0
    with WorkDir(out, part) as work:
        if _existing_or_claimed(request, work) is None:
            with local(request, workers) as crew:
                plan, packing = plan_work(work, request)
                own = [one for one in plan.ranges if part.has(one.number)]
                records = _pack(work, plan, packing, own, crew, request)
            left = len(plan.ranges) - len(work.done())
    return PreparedPart(out, tuple(records), left, time.perf_counter() - started)


def join_parts(
    sources: Sequence[str], out: Path, options: Options, **access: Unpack[Access]
) -> Prepared:
    """Join the parts that `prepare_part` packed into the dataset `out`.

    Raises: DataError naming the parts that are missing.
    """
    started = time.perf_counter()
    out = expanded(out)
    request = open_request(sources, out, options, **access)
    with WorkDir(out) as work:
        manifest = existing_dataset(out, request.source, request.progress)
        existed = manifest is not None
        if manifest is None:
            _check_parts(work, request)
            manifest = _write(work, request, LocalWorkers(1))
        else:
            work.clear()
    return Prepared(out, manifest, time.perf_counter() - started, existed)


def _check_parts(work: WorkDir, request: Request) -> None:
    """Check that all parts of this dataset are done.

    Raises: DataError.
    """
    stored = work.plan()
    if stored is None:
        raise DataError(
            f"No part of {work.out} is done.",
            fix="Do its parts first, with --part 1/N to --part N/N.",
        )
    check_same(work, stored, request)
    missing = sorted(set(range(len(stored.ranges))) - set(work.done()))
    if missing:
        raise DataError(
            f"{len(missing)} of {len(stored.ranges)} ranges of {work.out} are not done"
            f"{work.parts_of(missing)}.",
            fix="Run those parts again, then --join.",
        )


def default_workers(tasks: Sequence[ReadTask]) -> int:
    """Return how many processes to use: one per usable core, fewer for little text."""
    sizes = [task.num_bytes for task in tasks]
    useful = len(sizes) if 0 in sizes else sum(sizes) // BYTES_PER_WORKER
    cores = min(usable_cores(), cgroup_limits()[0] or useful)
    return max(1, min(cores, useful))


def _existing_or_claimed(request: Request, work: WorkDir) -> Manifest | None:
    """Return the manifest of an existing dataset, or claim the work directory and return None."""
    manifest = existing_dataset(work.out, request.source, request.progress)
    if manifest is None:
        work.claim()  # another process may have just finished the dataset
        manifest = existing_dataset(work.out, request.source, request.progress)
    if manifest is not None:
        work.clear()
    return manifest


def _write(work: WorkDir, request: Request, crew: Workers) -> Manifest:
    """Pack the remaining ranges, and join all; discard the work if the text is unusable."""
    plan, packing = plan_work(work, request)
    records = _pack(work, plan, packing, plan.ranges, crew, request)
    skipped: list[SkippedRows] = []
    for record in records:
        for rows in record.skipped:
            count_skipped(skipped, rows.reason, rows.first, rows.count)
    dropped = None
    if request.options.duplicates == "drop":
        with request.progress.task("Looking for duplicates"):
            dropped = find_duplicates(work, records, plan)
            first = first_dropped(plan, dropped)
            records = without_dropped(work, records, dropped)
        if dropped.count:
            count_skipped(skipped, "duplicate document", first, dropped.count)
    try:
        _check_splits(records, request, plan.rule, skipped)
    except DataError:
        work.clear()
        raise
    with request.progress.task("Writing to the disk"):
        return join(
            work,
            records,
            packing.tokenizer,
            source=request.source,
            split_rule=plan.rule,
            skipped=[rows.named() for rows in skipped],
            dropped=dropped,
        )


def _pack(
    work: WorkDir,
    plan: WorkPlan,
    packing: Packing,
    wanted: Sequence[Range],
    crew: Workers,
    request: Request,
) -> list[RangeRecord]:
    """Pack the `wanted` ranges that are not done, and return the records of all in order."""
    numbers = {one.number for one in wanted}
    done = {number: record for number, record in work.done().items() if number in numbers}
    check_files(work, list(done.values()))
    left = [one for one in wanted if one.number not in done]
    if done:
        request.progress.say(f"{len(done)} of {len(wanted)} ranges are done; {len(left)} remain.")
    sizes = [job.read_task.num_bytes for one in left for job in one.jobs]
    total = sum(sizes) / 1e6 if all(sizes) else None
    limit = BadRowLimit(request.options.max_bad_rows, sum(one.num_bytes for one in plan.ranges))
    records: list[RangeRecord] = []
    try:
        with request.progress.task("Tokenising", total=total, unit="MB") as task:
            packed = crew.pack(left, Setup(packing, work.ranges), _reporter(task))
            for one in wanted:
                records.append(done[one.number] if one.number in done else next(packed))
                limit.add(records[-1])
        _require_unchanged(work, left, request)
    except (Unfinished, NotHandedOut, Unreachable):  # the text is not at fault, so the work is kept
        raise
    except DataError as error:
        raise work.discard(error) from error
    return records


def _require_unchanged(work: WorkDir, packed: Sequence[Range], request: Request) -> None:
    """Check that the text has not changed since the start; if it has, forget the ranges packed.

    Raises: DataError naming a file that changed; Unreachable.
    """
    try:
        require_unchanged(request.corpus)
    except Unreachable:
        raise
    except DataError:
        for one in packed:
            record_path(work.ranges, one.number).unlink(missing_ok=True)
        raise


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


def _check_splits(
    records: Sequence[RangeRecord], request: Request, rule: str, skipped: Iterable[SkippedRows]
) -> None:
    """Check that both splits have documents.

    Raises: DataError naming the empty split, and a rule that works.
    """
    train, val = (sum(record.splits[name].documents for record in records) for name in SPLITS)
    if not train and (rule == NAMED or not val):
        raise no_documents(" ".join(request.source["names"]), skipped)
    if rule == NAMED and not val:
        raise no_documents(" ".join(request.source["val"]))
    if not train or not val:
        lacking = "validation" if train else "training"
        raise DataError(
            f"{' '.join(request.source['names'])}: the split rule {rule!r} leaves none of the "
            f"{train + val:,} documents for {lacking}.",
            fix="Set --split 'tail 0.1'.",
        )
