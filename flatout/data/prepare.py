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
from flatout.data.manifest import MANIFEST, SPLITS, Manifest, SkippedEntry
from flatout.data.pack import OnBadRow, Packed, Skipped
from flatout.data.plan import Plan, make_plan, parse_rule, sample_texts
from flatout.data.shards import Dataset
from flatout.data.tokenizer import Tokenizer, make_tokenizer
from flatout.data.workers import Setup, packed_in_order
from flatout.data.writer import DatasetWriter
from flatout.errors import DataError
from flatout.hardware import cgroup_limits
from flatout.progress import SILENT, Progress

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
    corpus = open_corpus(sources, text_field=options.text_field, from_file=from_file, cache=cache, progress=progress)
    source = describe(corpus, options)
    held = _held(out, source)
    if held is not None:
        progress.say(f"{out} already holds this data set: {held.tokens:,} tokens. Nothing to do.")
        return Prepared(out, held, time.perf_counter() - started, existed=True)
    limits = {"max_documents": options.max_documents, "max_bytes": options.max_bytes}
    plan = make_plan(
        corpus.parts, split=options.split or corpus.split, on_bad_row=options.on_bad_row, progress=progress, name=" ".join(sources), **limits
    )
    tokenizer = make_tokenizer(
        options.tokenizer,
        lambda limit: sample_texts(plan.jobs, limit),
        pattern=options.pattern,
        end_of_text=options.end_of_text,
        progress=progress,
    )
    manifest = _write(out, plan, tokenizer, source, options.on_bad_row, workers or usual_workers(plan), progress)
    return Prepared(out, manifest, time.perf_counter() - started, existed=False)


def _check(options: Options, workers: int | None) -> None:
    """Refuse values that cannot be meant, before anything is read."""
    for name, value in (("--max-documents", options.max_documents), ("--max-bytes", options.max_bytes), ("--workers", workers)):
        if value is not None and value < 1:
            raise DataError(f"{name} {value} is not a number from 1 up.", fix=f"Leave {name} out, or give a larger number.")
    if options.on_bad_row not in ("raise", "skip"):
        raise DataError(f"--on-bad-row {options.on_bad_row!r} is not known.", fix="Give raise or skip.")
    if options.tokenizer.endswith(".gz"):
        raise DataError(f"The tokenizer {options.tokenizer} is packed.", fix="Unpack it first, for example with `gunzip --keep`.")
    if options.split is not None:
        parse_rule(options.split)


def usual_workers(plan: Plan) -> int:
    """Return how many processes to use: one a usable core, fewer for little text."""
    sizes = [job.part.num_bytes for job in plan.jobs]
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
    different = [key for key in source if key != "names" and held.source.get(key) != source[key]]
    if not different:
        return held
    said = [f"{key} {held.source.get(key)!r} there, {source[key]!r} asked for" for key in different if key != "fingerprint"]
    if "fingerprint" in different:
        there, asked = " ".join(held.source.get("names", [])), " ".join(source["names"])
        said.append("the text has changed" if there == asked else f"the text of {there} there, of {asked} asked for")
    raise DataError(f"{out} holds another data set: {'; '.join(said)}.", fix="Choose another --out, or remove that folder.")


def _write(out: Path, plan: Plan, tokenizer: Tokenizer, source: dict[str, Any], on_bad_row: OnBadRow, workers: int, progress: Progress) -> Manifest:
    """Pack the plan into the folder; when anything goes wrong, nothing of it stays."""
    total = sum(job.part.num_bytes for job in plan.jobs) if all(job.part.num_bytes for job in plan.jobs) else None
    setup = Setup(tokenizer, plan.assignment, on_bad_row)
    with DatasetWriter(out, vocab_size=tokenizer.vocab_size) as writer:
        packed = packed_in_order(plan.jobs, setup, workers)
        try:
            with progress.task("Tokenising", total=total and total / 1e6, unit="MB") as task:
                skipped = Skipped()
                for part in packed:
                    _append(writer, part)
                    skipped.extend(part.skipped)
                    task.advance(part.num_bytes / 1e6)
        finally:
            packed.close()
        _check_splits(writer, source, plan, skipped)
        with progress.task("Writing to the disk"):
            entries = [
                SkippedEntry(reason=reason, count=count, first=tuple(map(_storable, skipped.first[reason])))
                for reason, count in skipped.counts.items()
            ]
            return writer.finish(tokenizer=tokenizer, source=source, split_rule=plan.rule, skipped=entries)


def _storable(name: str) -> str:
    """Return a file's name as text, also where its bytes are not UTF-8."""
    return name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


def _append(writer: DatasetWriter, packed: Packed) -> None:
    for name in SPLITS:
        split = packed.splits[name]
        if len(split.tokens):
            (writer.train if name == "train" else writer.val).append(split.tokens, split.ends, text_bytes=split.text_bytes)


def _check_splits(writer: DatasetWriter, source: Mapping[str, Any], plan: Plan, skipped: Skipped) -> None:
    """Refuse a data set that lacks a split.

    Raises: DataError saying which, and which rule would do.
    """
    names = " ".join(source["names"])
    documents = writer.train.num_documents + writer.val.num_documents
    if not documents:
        raise empty(names, skipped.counts.items())
    if not writer.train.num_documents or not writer.val.num_documents:
        lacking = "validation" if writer.train.num_documents else "training"
        raise DataError(f"{names}: by {plan.rule!r} none of the {documents:,} documents is for {lacking}.", fix="Set --split 'tail 0.1'.")


def empty(names: str, left_out: Iterable[tuple[str, int]]) -> DataError:
    """Return the error for a corpus without a document."""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out)
    return DataError(f"{names} holds no document{f' ({reasons})' if reasons else ''}.", fix="Name a file or folder with text in it.")
