"""Stage 1, whole: text in, a data set folder out. Tokenised once, in parallel, the same bytes for any number of workers."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.data.corpus import CACHE, Corpus, open_corpus
from flatout.data.disk import Unfinished
from flatout.data.join import check, join
from flatout.data.limits import BadRowLimit, check_space
from flatout.data.manifest import MANIFEST, SPLITS, Manifest
from flatout.data.pack import OnBadRow, Packing, Skipped, Tally, Tell
from flatout.data.plan import Plan, make_plan, parse_rule, sample_texts
from flatout.data.ranges import Range, RangeRecord, make_ranges
from flatout.data.shards import Dataset
from flatout.data.tokenizer import Tokenizer, make_tokenizer
from flatout.data.work import StoredPlan, WorkFolder
from flatout.data.workers import Crew, Setup
from flatout.errors import DataError
from flatout.hardware import cgroup_limits
from flatout.progress import SILENT, Progress, Task
from flatout.sources import Part

BYTES_PER_WORKER = 8_000_000
"""Below so much text each, another process costs more than it saves."""


@dataclass(frozen=True)
class Options:
    """What shapes a data set, besides its text."""

    tokenizer: str = "train:4096"
    """char, byte, train:N, or a tokenizer file."""
    pattern: str | None = None
    """Splits text for a .tiktoken file that is not a known one."""
    end_of_text: str | None = None
    """End-of-text token of a tokenizer.json, when it has none of the usual names."""
    text_field: str | None = None
    """Field of a JSONL row that holds the text."""
    split: str | None = None
    """Split rule; plan.make_plan says what is usual."""
    max_documents: int | None = None
    """Documents to take at most."""
    max_bytes: int | None = None
    """Bytes of text to take at most."""
    on_bad_row: OnBadRow = "raise"
    """What a row does that cannot be used."""
    max_bad_rows: int | None = None
    """So many are skipped at most; None stands for one in a hundred, and 100 in any case."""
    mask_field: str | None = None
    """Field of a row that holds what comes before its text and is not learned from."""


@dataclass(frozen=True)
class Prepared:
    """A data set folder, and what it took."""

    path: Path
    manifest: Manifest
    seconds: float
    existed: bool
    """Whether the folder held this very data set before."""


def prepare_dataset(
    sources: Sequence[str],
    out: Path,
    options: Options,
    *,
    from_file: str | None = None,
    workers: int | None = None,
    cache: Path = CACHE,
    progress: Progress = SILENT,
) -> Prepared:
    """Write the data set of some sources to the folder `out`, which is then whole, or as it was before.

    A folder that holds this very data set is left as it is.

    Raises: DataError for text, a tokenizer or a folder that cannot be used.
    """
    started = time.perf_counter()
    _check(options, workers)
    spool = out.resolve().parent
    corpus = open_corpus(
        sources, text_field=options.text_field, mask_field=options.mask_field, from_file=from_file, cache=cache, spool=spool, progress=progress
    )
    source = describe(corpus, options)
    held = _held(out, source)
    with WorkFolder(out) as work:
        if held is not None:
            work.clear()
            progress.say(f"{out} already holds this data set: {held.tokens:,} tokens. Nothing to do.")
            return Prepared(out, held, time.perf_counter() - started, existed=True)
        with Crew(workers or usual_workers(corpus.parts)) as crew:
            planned = _resume(work, corpus, source, options, cache, progress) or _begin(work, corpus, source, options, cache, progress)
            manifest = _write(work, planned, source, options, crew, progress)
    return Prepared(out, manifest, time.perf_counter() - started, existed=False)


def _check(options: Options, workers: int | None) -> None:
    """Refuse values that cannot be meant, before anything is read."""
    numbers = {"--max-documents": options.max_documents, "--max-bytes": options.max_bytes, "--workers": workers}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise DataError(f"{name} {value} is not a number from 1 up.", fix=f"Leave {name} out, or give a larger number.")
    if options.on_bad_row not in ("raise", "skip"):
        raise DataError(f"--on-bad-row {options.on_bad_row!r} is not known.", fix="Give raise or skip.")
    if options.max_bad_rows is not None and (options.on_bad_row != "skip" or options.max_bad_rows < 0):
        raise DataError(
            f"--max-bad-rows {options.max_bad_rows} is not the number of rows that may be skipped.", fix="Give 0 or more, with --on-bad-row skip."
        )
    if options.tokenizer.endswith(".gz"):
        raise DataError(f"The tokenizer {options.tokenizer} is packed.", fix="Unpack it first, for example with `gunzip --keep`.")
    if options.split is not None:
        parse_rule(options.split)


def usual_workers(parts: Sequence[Part]) -> int:
    """Return how many processes to use: one a usable core, fewer for little text."""
    sizes = [part.num_bytes for part in parts]
    useful = len(sizes) if 0 in sizes else sum(sizes) // BYTES_PER_WORKER
    cores = min(len(os.sched_getaffinity(0)), cgroup_limits()[0] or useful)
    return max(1, min(cores, useful))


def describe(corpus: Corpus, options: Options) -> dict[str, Any]:
    """Return what the manifest says of the text: two data sets of which this is equal are the same, but for the names."""
    return {
        "names": list(corpus.names),
        "fingerprint": corpus.fingerprint,
        "tokenizer": tokenizer_mark(options.tokenizer),
        "pattern": options.pattern,
        "end_of_text": options.end_of_text,
        "text_field": options.text_field,
        "split": options.split or corpus.split,
        "max_documents": options.max_documents,
        "max_bytes": options.max_bytes,
        "on_bad_row": options.on_bad_row,
        "mask_field": options.mask_field,
    }


def tokenizer_mark(spec: str) -> str:
    """Return what tells one tokenizer from another: its name, or the digest of its file."""
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    is_name = spec in ("char", "byte") or spec.startswith("train:")
    return spec if is_name or not path.is_file() else f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _held(out: Path, source: Mapping[str, Any]) -> Manifest | None:
    """Return the manifest of the folder when it holds this very data set, None when there is room for it.

    Raises: DataError when it holds anything else, naming the difference.
    """
    if not (out / MANIFEST).is_file():
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise DataError(f"{out} is not empty and is not a data set.", fix="Choose another --out, or remove what is there.")
        return None
    held = Dataset.open(out).manifest
    difference = _difference(held.source, source)
    if difference:
        raise DataError(f"{out} holds another data set: {difference}.", fix="Choose another --out, or remove that folder.")
    return held


def _difference(there: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return how two descriptions differ, in words; nothing when they are of the same data set."""
    different = [key for key in asked if key != "names" and there.get(key) != asked[key]]
    said = [f"{key} {there.get(key)!r} there, {asked[key]!r} asked for" for key in different if key != "fingerprint"]
    if "fingerprint" in different:
        names, wanted = " ".join(there.get("names", [])), " ".join(asked["names"])
        said.append("the text has changed" if names == wanted else f"the text of {names} there, of {wanted} asked for")
    return "; ".join(said)


@dataclass(frozen=True)
class _Planned:
    """What is to be packed, and with what."""

    plan: Plan
    ranges: list[Range]
    tokenizer: Tokenizer


def _begin(work: WorkFolder, corpus: Corpus, source: dict[str, Any], options: Options, cache: Path, progress: Progress) -> _Planned:
    """Plan the work and write the plan down."""
    plan = make_plan(
        corpus.parts,
        split=options.split or corpus.split,
        max_documents=options.max_documents,
        max_bytes=options.max_bytes,
        on_bad_row=options.on_bad_row,
        progress=progress,
        name=" ".join(corpus.names),
    )
    tokenizer = _tokenizer(options.tokenizer, plan, options, cache, progress)
    ranges = make_ranges(plan.jobs)
    check_space(work.out, [job.part.num_bytes for job in plan.jobs], tokenizer)
    work.begin(StoredPlan.of(plan, ranges, corpus.parts, source, tokenizer), tokenizer)
    return _Planned(plan, ranges, tokenizer)


def _resume(work: WorkFolder, corpus: Corpus, source: dict[str, Any], options: Options, cache: Path, progress: Progress) -> _Planned | None:
    """Return the plan that a stopped prepare was following; None when there is none.

    Raises: DataError when it is the plan of another data set, naming the difference.
    """
    stored = work.plan()
    if stored is None:
        return None
    difference = _difference(stored.source, source)
    if not difference and stored.part_bytes != tuple(part.num_bytes for part in corpus.parts):
        difference = "the text is read in other parts"
    if difference:
        raise DataError(
            f"{work.path} holds half of another data set: {difference}.",
            fix=f"Ask for what is there, choose another --out, or remove the folder {work.path}, which gives up what is done.",
        )
    plan, ranges = stored.restored(corpus.parts)
    return _Planned(plan, ranges, _tokenizer(str(work.tokenizer), plan, options, cache, progress))


def _tokenizer(spec: str, plan: Plan, options: Options, cache: Path, progress: Progress) -> Tokenizer:
    return make_tokenizer(
        spec,
        lambda limit: sample_texts(plan.jobs, limit),
        pattern=options.pattern,
        end_of_text=options.end_of_text,
        cache=cache,
        progress=progress,
    )


def _write(work: WorkFolder, planned: _Planned, source: dict[str, Any], options: Options, crew: Crew, progress: Progress) -> Manifest:
    """Pack the ranges that are not done, and join them all; text that cannot be used takes what is done with it."""
    done = work.done()
    check(work, list(done.values()))
    try:
        records = _packed(work, planned, done, options, crew, progress)
        skipped = Skipped()
        for record in records:
            for entry in record.skipped:
                skipped.add(entry.reason, entry.first, entry.count)
        _check_splits(records, source, planned.plan, skipped)
    except Unfinished:
        raise
    except DataError:
        work.clear()
        raise
    with progress.task("Writing to the disk"):
        return join(work, records, planned.tokenizer, source=source, split_rule=planned.plan.rule, skipped=skipped.entries())


def _packed(work: WorkFolder, planned: _Planned, done: dict[int, RangeRecord], options: Options, crew: Crew, progress: Progress) -> list[RangeRecord]:
    """Return the records of all ranges, in order."""
    left = [piece for piece in planned.ranges if piece.number not in done]
    if done:
        progress.say(f"{len(done)} of {len(planned.ranges)} ranges were done before; {len(left)} are left.")
    sizes = [job.part.num_bytes for piece in left for job in piece.jobs]
    total = sum(sizes) / 1e6 if all(sizes) else None
    packing = Packing(planned.tokenizer, planned.plan.assignment, options.on_bad_row, options.mask_field)
    records: list[RangeRecord] = []
    with progress.task("Tokenising", total=total, unit="MB") as task:
        made = crew.pack(left, Setup(packing, work.ranges), _reporter(task))
        bad_rows = BadRowLimit(options.max_bad_rows)
        for piece in planned.ranges:
            records.append(done[piece.number] if piece.number in done else next(made))
            bad_rows.add(records[-1])
    return records


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


def _check_splits(records: Sequence[RangeRecord], source: Mapping[str, Any], plan: Plan, skipped: Skipped) -> None:
    """Refuse a data set that lacks a split.

    Raises: DataError saying which, and which rule would do.
    """
    names = " ".join(source["names"])
    train, val = (sum(record.splits[name].documents for record in records) for name in SPLITS)
    if not train + val:
        raise empty(names, skipped.counts.items())
    if not train or not val:
        lacking = "validation" if train else "training"
        raise DataError(f"{names}: by {plan.rule!r} none of the {train + val:,} documents is for {lacking}.", fix="Set --split 'tail 0.1'.")


def empty(names: str, left_out: Iterable[tuple[str, int]]) -> DataError:
    """Return the error for a corpus without a document."""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out)
    return DataError(f"{names} holds no document{f' ({reasons})' if reasons else ''}.", fix="Name a file or folder with text in it.")
