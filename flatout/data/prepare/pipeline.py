"""Stage 1, whole: text in, a data set folder out. Tokenised once, in parallel, the same bytes for
any number of workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.cache import CACHE
from flatout.data.prepare.dedup import find_duplicates, where_dropped, without
from flatout.data.prepare.inputs import require_unchanged
from flatout.data.prepare.limits import BadRowLimit
from flatout.data.prepare.local_workers import Crew, Setup, Workers
from flatout.data.prepare.merge import check, join
from flatout.data.prepare.options import Options as Options
from flatout.data.prepare.options import (
    Planned,
    Request,
    check_same,
    difference,
    open_request,
    plan,
)
from flatout.data.prepare.ranges import Range, RangeRecord, record_path
from flatout.data.prepare.split_rule import NAMED, empty
from flatout.data.prepare.tokenize import Skipped, Tally, Tell
from flatout.data.prepare.work_dir import PartOf, WorkFolder
from flatout.data.store.manifest import MANIFEST, SPLITS, Manifest
from flatout.data.store.shards import Dataset
from flatout.errors import DataError, OutputInUse
from flatout.files import Unfinished, expanded
from flatout.hardware import cgroup_limits, usable_cores
from flatout.progress import SILENT, Progress, Task
from flatout.registry import unknown_name
from flatout.sources import ReadTask
from flatout.sources.packed import NotHandedOut
from flatout.transfer.connection import Unreachable

BYTES_PER_WORKER = 8_000_000
"""Below so much text each, another process costs more than it saves."""


@dataclass(frozen=True)
class Prepared:
    """A data set folder, and what it took."""

    path: Path
    manifest: Manifest
    seconds: float
    existed: bool
    """Whether the folder held this very data set before."""


@dataclass(frozen=True)
class PreparedPart:
    """What one process did of a data set, and what is left for others."""

    path: Path
    records: tuple[RangeRecord, ...]
    """Its ranges."""
    left: int
    """Ranges that no process has done yet."""
    seconds: float


Engine = Callable[[Request, int | None], AbstractContextManager[Workers]]
"""What finds workers for a request, so many as are asked for or as are usual."""


def engine_named(name: str) -> Engine:
    """Return the engine of this name: local or ray.

    Raises: ConfigError with the nearest name; MissingPackage when it takes a package that is not
            installed.
    """
    if name not in ("local", "ray"):
        raise unknown_name("engine", name, ("local", "ray"))
    return local if name == "local" else _ray_engine()


def local(request: Request, workers: int | None) -> AbstractContextManager[Workers]:
    """Return processes on this machine."""
    return Crew(workers or usual_workers(request.corpus.all_parts))


def _ray_engine() -> Engine:
    from flatout.data.prepare.ray_workers import RayCrew, ray_package

    ray_package()
    return lambda request, workers: RayCrew(workers, progress=request.progress)


def prepare_dataset(
    sources: Sequence[str],
    out: Path,
    options: Options,
    *,
    from_file: str | None = None,
    workers: int | None = None,
    engine: Engine = local,
    cache: Path = CACHE,
    progress: Progress = SILENT,
) -> Prepared:
    """Write the data set of some sources to the folder `out`, which is then whole, or as it was
    before.

    A folder that holds this very data set is left as it is.

    Raises: DataError for text, a tokenizer or a folder that cannot be used.
    """
    started = time.perf_counter()
    check_workers(workers)
    out = expanded(out)
    request = open_request(
        sources, out, options, from_file=from_file, cache=cache, progress=progress
    )
    return replace(
        prepare_request(request, out, workers, engine), seconds=time.perf_counter() - started
    )


def prepare_request(
    request: Request, out: Path, workers: int | None = None, engine: Engine = local
) -> Prepared:
    """Write the data set of a request as `prepare_dataset` does; arguments and errors are the same."""
    started = time.perf_counter()
    with WorkFolder(out) as work:
        held = _held_or_claimed(out, request, work)
        if held is not None:
            return Prepared(out, held, time.perf_counter() - started, existed=True)
        with engine(request, workers) as crew:
            manifest = _write(work, request, crew)
    return Prepared(out, manifest, time.perf_counter() - started, existed=False)


def prepare_part(
    sources: Sequence[str],
    out: Path,
    options: Options,
    part: PartOf,
    *,
    from_file: str | None = None,
    workers: int | None = None,
    cache: Path = CACHE,
    progress: Progress = SILENT,
) -> PreparedPart:
    """Do a part of the work for the data set `out`, while other processes, on this machine or
    others, do other parts of it.

    Raises: DataError as `prepare_dataset` does, and when another process does this part.
    """
    started = time.perf_counter()
    check_workers(workers)
    out = expanded(out)
    request = open_request(
        sources, out, options, from_file=from_file, cache=cache, progress=progress
    )
    with WorkFolder(out, part) as work:
        if _held_or_claimed(out, request, work) is not None:
            return PreparedPart(out, (), 0, time.perf_counter() - started)
        with local(request, workers) as crew:
            planned = plan(work, request)
            mine = [piece for piece in planned.ranges if part.has(piece.number)]
            records = _packed(work, planned, mine, crew, request)
        return PreparedPart(
            out,
            tuple(records),
            len(planned.ranges) - len(work.done()),
            time.perf_counter() - started,
        )


def join_parts(
    sources: Sequence[str],
    out: Path,
    options: Options,
    *,
    from_file: str | None = None,
    cache: Path = CACHE,
    progress: Progress = SILENT,
) -> Prepared:
    """Join what `prepare_part` did to the data set `out`.

    Raises: DataError when something is missing, saying which parts are.
    """
    started = time.perf_counter()
    out = expanded(out)
    request = open_request(
        sources, out, options, from_file=from_file, cache=cache, progress=progress
    )
    with WorkFolder(out) as work:
        held = _held(out, request, work)
        if held is not None:
            return Prepared(out, held, time.perf_counter() - started, existed=True)
        stored = work.plan()
        if stored is None:
            raise DataError(
                f"No part of {out} is done.",
                fix="Do its parts first, with --part 1/N to --part N/N.",
            )
        check_same(work, stored, request)
        missing = sorted(set(range(len(stored.ranges))) - set(work.done()))
        if missing:
            raise DataError(
                f"{len(missing)} of {len(stored.ranges)} ranges of {out} are not done{work.whose(missing)}.",
                fix="Run those parts again, then --join.",
            )
        with Crew(1) as crew:
            manifest = _write(work, request, crew)
    return Prepared(out, manifest, time.perf_counter() - started, existed=False)


def check_workers(workers: int | None) -> None:
    """Refuse a number of processes that cannot be meant.

    Raises: DataError.
    """
    if workers is not None and workers < 1:
        raise DataError(
            f"--workers {workers} is not a number from 1 up.",
            fix="Leave --workers out, or give a larger number.",
        )


def usual_workers(parts: Sequence[ReadTask]) -> int:
    """Return how many processes to use: one a usable core, fewer for little text."""
    sizes = [part.num_bytes for part in parts]
    useful = len(sizes) if 0 in sizes else sum(sizes) // BYTES_PER_WORKER
    cores = min(usable_cores(), cgroup_limits()[0] or useful)
    return max(1, min(cores, useful))


def _held_or_claimed(out: Path, request: Request, work: WorkFolder) -> Manifest | None:
    """Return what `_held` does; where that is None, the work folder is this process's, and nobody
    else wrote the data set until then.
    """
    held = _held(out, request, work)
    if held is None:
        work.claim()
        held = _held(out, request, work)
    return held


def _held(out: Path, request: Request, work: WorkFolder) -> Manifest | None:
    """Return the manifest of the folder when it holds this very data set, None when there is room
    for it.

    Raises: DataError when it holds anything else, naming the difference.
    """
    if not (out / MANIFEST).is_file():
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise OutputInUse(
                f"{out} is not empty and is not a data set.",
                fix="Choose another --out, or remove what is there.",
            )
        return None
    held = Dataset.open(out).manifest
    different = difference(held.source, request.source)
    if different:
        raise OutputInUse(
            f"{out} holds another data set: {different}.",
            fix="Choose another --out, or remove that folder.",
        )
    work.clear()
    request.progress.say(
        f"{out} already holds this data set: {held.tokens:,} tokens. Nothing to do."
    )
    return held


def _write(work: WorkFolder, request: Request, crew: Workers) -> Manifest:
    """Pack the ranges that are not done, and join them all; text that cannot be used takes what is
    done with it.
    """
    planned = plan(work, request)
    records = _packed(work, planned, planned.ranges, crew, request)
    skipped = Skipped()
    for record in records:
        for entry in record.skipped:
            skipped.add(entry.reason, entry.first, entry.count)
    dropped = None
    if request.options.duplicates == "drop":
        with request.progress.task("Looking for duplicates"):
            dropped = find_duplicates(work, records, kept="val" if planned.rule == NAMED else None)
            named = where_dropped(planned.ranges, planned.packing.assignment, dropped)
            records = without(work, records, dropped)
        if dropped.count:
            skipped.add("duplicate document", named, dropped.count)
    try:
        _check_splits(records, request.source, planned.rule, skipped)
    except DataError:
        work.clear()
        raise
    with request.progress.task("Writing to the disk"):
        return join(
            work,
            records,
            planned.packing.tokenizer,
            source=request.source,
            split_rule=planned.rule,
            skipped=skipped.entries(),
            dropped=dropped,
        )


def _packed(
    work: WorkFolder, planned: Planned, wanted: list[Range], crew: Workers, request: Request
) -> list[RangeRecord]:
    """Return the records of some ranges, in order; those that are not done are packed."""
    numbers = {piece.number for piece in wanted}
    done = {number: record for number, record in work.done().items() if number in numbers}
    check(work, list(done.values()))
    left = [piece for piece in wanted if piece.number not in done]
    if done:
        request.progress.say(
            f"{len(done)} of {len(wanted)} ranges were done before; {len(left)} are left."
        )
    sizes = [job.part.num_bytes for piece in left for job in piece.jobs]
    total = sum(sizes) / 1e6 if all(sizes) else None
    records: list[RangeRecord] = []
    try:
        with request.progress.task("Tokenising", total=total, unit="MB") as task:
            made = crew.pack(left, Setup(planned.packing, work.ranges), _reporter(task))
            bad_rows = BadRowLimit(
                request.options.max_bad_rows, sum(piece.num_bytes for piece in planned.ranges)
            )
            for piece in wanted:
                records.append(done[piece.number] if piece.number in done else next(made))
                bad_rows.add(records[-1])
        _require_unchanged(work, left, request)
    except (Unfinished, NotHandedOut, Unreachable):  # no fault of the text
        raise
    except DataError as error:
        raise work.give_up(error) from error
    return records


def _require_unchanged(work: WorkFolder, packed: Sequence[Range], request: Request) -> None:
    """Check that the text is still what it was when this process began; else what was packed of it
    is no longer done.

    Raises: DataError naming a file that was changed; Unreachable.
    """
    try:
        require_unchanged(request.corpus)
    except Unreachable:
        raise
    except DataError:
        for piece in packed:
            record_path(work.ranges, piece.number).unlink(missing_ok=True)
        raise


def _reporter(task: Task) -> Tell:
    """Return what shows the work as it is done: bytes, documents, tokens a second."""
    started = time.perf_counter()
    documents = tokens = 0

    def tell(tally: Tally) -> None:
        nonlocal documents, tokens
        documents += tally.documents
        tokens += tally.tokens
        rate = tokens / max(time.perf_counter() - started, 1e-9)
        task.note(f"{documents:,} documents, {rate:,.0f} tokens/s")
        task.advance(tally.num_bytes / 1e6)

    return tell


def _check_splits(
    records: Sequence[RangeRecord], source: Mapping[str, Any], rule: str, skipped: Skipped
) -> None:
    """Refuse a data set that lacks a split.

    Raises: DataError saying which, and which rule would do.
    """
    names = " ".join(source["names"])
    train, val = (sum(record.splits[name].documents for record in records) for name in SPLITS)
    if not train and (rule == NAMED or not val):
        raise empty(names, skipped.counts.items())
    if rule == NAMED and not val:
        raise empty(" ".join(source["val"]), ())
    if not train or not val:
        lacking = "validation" if train else "training"
        raise DataError(
            f"{names}: by {rule!r} none of the {train + val:,} documents is for {lacking}.",
            fix="Set --split 'tail 0.1'.",
        )
