"""What prepare is asked for, and the plan that follows from it: made once and written down, then
followed until the data set is whole.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from flatout.cache import CACHE
from flatout.data.prepare.inputs import Corpus, load_card, on_both_sides, open_corpus
from flatout.data.prepare.limits import check_space
from flatout.data.prepare.ranges import Range, make_ranges
from flatout.data.prepare.sample import prompts_and_texts_of, sample_texts, texts_by_hash, texts_of
from flatout.data.prepare.split_rule import (
    NAMED,
    Plan,
    empty,
    make_named_plan,
    make_plan,
    parse_rule,
)
from flatout.data.prepare.tokenize import Duplicates, Job, OnBadRow, Packing
from flatout.data.prepare.work_dir import StoredPlan, WorkFolder, refuse_mount
from flatout.data.tokenizers import Tokenizer, make_tokenizer, read_tokenizer, tokenizer_place
from flatout.errors import DataError, without_secrets
from flatout.progress import SILENT, Progress
from flatout.registry import DATASETS
from flatout.sources import Document, LeftOut
from flatout.sources.encodings import codec_of

USUAL_FIELD = "text"
"""The field of a row that holds its text, where none is named."""


@dataclass(frozen=True)
class Options:
    """What shapes a data set, besides the text that is named first."""

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
    duplicates: Duplicates = "keep"
    """What becomes of a document whose prompt and text were there before."""
    val: tuple[str, ...] = ()
    """Text for validation alone, named as any other; nothing leaves it to the card or the split
    rule.
    """
    include: tuple[str, ...] = ()
    """Patterns of files that are taken from folders besides those that always are."""
    encoding: str | None = None
    """That of text that is not UTF-8."""


@dataclass(frozen=True)
class Request:
    """The text, and what is to be made of it."""

    corpus: Corpus
    options: Options
    source: dict[str, Any]
    """What the manifest says of both."""
    cache: Path
    progress: Progress


def open_request(
    sources: Sequence[str],
    out: Path,
    options: Options,
    *,
    from_file: str | None = None,
    cache: Path = CACHE,
    progress: Progress = SILENT,
) -> Request:
    """Return the request to prepare some sources.

    Raises: DataError for options and a folder that cannot be meant, before anything is read, and
            for sources that cannot.
    """
    _check(options)
    options = replace(options, encoding=codec_of(options.encoding))
    refuse_mount(out)
    spool = out.resolve().parent
    corpus = open_corpus(
        sources,
        val=options.val,
        split=options.split,
        text_field=options.text_field,
        mask_field=options.mask_field,
        include=options.include,
        encoding=options.encoding,
        from_file=from_file,
        cache=cache,
        spool=spool,
        progress=progress,
    )
    twice = on_both_sides(corpus) if options.duplicates == "keep" else None
    if twice is not None:
        raise DataError(
            f"{twice} is both training and validation text: what is trained on validates nothing.",
            fix="Leave it out of one of them, or add --duplicates drop: training then goes without what validation holds.",
        )
    return Request(corpus, options, describe(corpus, options), cache, progress)


def _check(options: Options) -> None:
    """Refuse values that cannot be meant, before anything is read."""
    numbers = {"--max-documents": options.max_documents, "--max-bytes": options.max_bytes}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise DataError(
                f"{name} {value} is not a number from 1 up.",
                fix=f"Leave {name} out, or give a larger number.",
            )
    if options.on_bad_row not in ("raise", "skip"):
        raise DataError(
            f"--on-bad-row {options.on_bad_row!r} is not known.", fix="Give raise or skip."
        )
    if options.duplicates not in ("keep", "drop"):
        raise DataError(
            f"--duplicates {options.duplicates!r} is not known.", fix="Give keep or drop."
        )
    if options.max_bad_rows is not None and (
        options.on_bad_row != "skip" or options.max_bad_rows < 0
    ):
        raise DataError(
            f"--max-bad-rows {options.max_bad_rows} is not the number of rows that may be skipped.",
            fix="Give 0 or more, with --on-bad-row skip.",
        )
    if options.tokenizer.endswith(".gz"):
        raise DataError(
            f"The tokenizer {options.tokenizer} is packed.",
            fix="Unpack it first, for example with `gunzip --keep`.",
        )
    if options.split is not None:
        parse_rule(options.split)
        if options.val:
            raise DataError(
                f"--val names the validation text, and --split {options.split!r} takes it from the text to train on.",
                fix="Leave one of the two out.",
            )


def describe(corpus: Corpus, options: Options) -> dict[str, Any]:
    """Return what the manifest says of the text: two data sets of which this is equal are the same,
    but for the names.
    """
    return {
        "names": [without_secrets(name) for name in corpus.names],
        "fingerprint": corpus.fingerprint,
        "tokenizer": tokenizer_mark(options.tokenizer),
        "pattern": options.pattern,
        "end_of_text": options.end_of_text,
        "text_field": options.text_field or _usual_fields(corpus),
        "split": _normal("split", corpus.split) if corpus.validation is None else NAMED,
        "val": None
        if corpus.validation is None
        else [without_secrets(name) for name in corpus.validation.names],
        "val_fingerprint": None if corpus.validation is None else corpus.validation.fingerprint,
        "max_documents": options.max_documents,
        "max_bytes": options.max_bytes,
        "on_bad_row": options.on_bad_row,
        "mask_field": options.mask_field,
        "duplicates": None if options.duplicates == "keep" else options.duplicates,
        "include": list(options.include) or None,
        "encoding": options.encoding,
    }


def _usual_fields(corpus: Corpus) -> str:
    """Return which field is read where none is asked for: that of each card, and `text` of all
    else.
    """
    names = (*corpus.names, *(corpus.validation.names if corpus.validation is not None else ()))
    cards = DATASETS.names()
    return " and ".join(
        sorted({load_card(name).text_field if name in cards else USUAL_FIELD for name in names})
    )


def _normal(key: str, value: Any) -> Any:
    """Return a value of a description as all that mean the same are written; older manifests hold
    what was typed.
    """
    if key == "text_field":
        return value or USUAL_FIELD
    if key == "split" and value not in (None, NAMED):
        kind, fraction = parse_rule(value)
        return f"{kind} {fraction}"
    return value


def tokenizer_mark(spec: str) -> str:
    """Return what tells one tokenizer from another: its name, or the digest of its file.

    Raises: DataError when it is a file that cannot be read, or a folder without one.
    """
    if spec in ("char", "byte") or spec.startswith("train:"):
        return spec
    path = tokenizer_place(spec)
    return f"sha256:{hashlib.sha256(read_tokenizer(path)).hexdigest()}" if path.is_file() else spec


def difference(there: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return how two descriptions differ, in words; nothing when they are of the same data set."""
    values = {
        key: (_normal(key, there.get(key)), _normal(key, asked[key]))
        for key in asked
        if key not in ("names", "val")
    }
    different = [key for key, (one, other) in values.items() if one != other]
    said = [
        f"{key} {values[key][0]!r} there, {values[key][1]!r} asked for"
        for key in different
        if not key.endswith("fingerprint")
    ]
    if "fingerprint" in different:
        names, wanted = " ".join(there.get("names", [])), " ".join(asked["names"])
        said.append(
            "the text has changed"
            if names == wanted
            else f"the text of {names} there, of {wanted} asked for"
        )
    if "val_fingerprint" in different:
        names, wanted = (" ".join(one.get("val") or ["nothing"]) for one in (there, asked))
        said.append(
            "the validation text has changed"
            if names == wanted
            else f"the validation text {names} there, {wanted} asked for"
        )
    return "; ".join(said)


@dataclass(frozen=True)
class Planned:
    """What is to be packed, and how."""

    ranges: list[Range]
    packing: Packing
    rule: str


def plan(work: WorkFolder, request: Request) -> Planned:
    """Return the plan that is being followed in the work folder, or make one and write it down.

    Raises: DataError when it is the plan of another data set, naming the difference, or none can be
            made.
    """
    stored = work.plan()
    return _begun(work, request) if stored is None else _followed(work, stored, request)


def _begun(work: WorkFolder, request: Request) -> Planned:
    corpus, options = request.corpus, request.options
    made = _made(request)
    tokenizer = _tokenizer(options.tokenizer, made, request)
    ranges = make_ranges(made.jobs)
    check_space(work.out, [job.part.num_bytes for job in made.jobs], tokenizer)
    stored = StoredPlan.of(
        made, ranges, corpus.all_parts, request.source, tokenizer, moment=corpus.moment
    )
    there = work.begin(stored, tokenizer)
    return (
        _planned(made, ranges, tokenizer, options)
        if there == stored
        else _followed(work, there, request)
    )


def _made(request: Request) -> Plan:
    corpus, options = request.corpus, request.options
    limits: dict[str, Any] = {
        "max_documents": options.max_documents,
        "max_bytes": options.max_bytes,
        "on_bad_row": options.on_bad_row,
    }
    if corpus.validation is not None:
        return make_named_plan(
            corpus.parts, corpus.validation.parts, progress=request.progress, **limits
        )
    return make_plan(
        corpus.parts,
        split=corpus.split,
        progress=request.progress,
        name=" ".join(corpus.names),
        **limits,
    )


def check_same(work: WorkFolder, stored: StoredPlan, request: Request) -> None:
    """Do nothing when the plan in the work folder is for what is asked for.

    Raises: DataError naming the difference.
    """
    parts = request.corpus.all_parts
    different = difference(stored.source, request.source)
    if not different and stored.part_bytes != tuple(part.num_bytes for part in parts):
        different = "the text is read in other parts"
    if different:
        raise DataError(
            f"{work.path} holds half of another data set: {different}.",
            fix=f"Ask for what is there, choose another --out, or remove the folder {work.path}, which gives up what is done.",
        )
    if stored.moment and stored.moment != request.corpus.moment:
        raise DataError(
            f"The text has changed since the work in {work.path} was begun: a file has another size or another time.",
            fix=f"Put the text back as it was, its time too, or remove the folder {work.path}, which gives up what is done.",
        )


def _followed(work: WorkFolder, stored: StoredPlan, request: Request) -> Planned:
    check_same(work, stored, request)
    made, ranges = stored.restored(request.corpus.all_parts)
    tokenizer = _tokenizer(str(work.tokenizer), made, request)
    if tokenizer.digest() != stored.tokenizer:
        raise DataError(
            f"{work.tokenizer} is not the tokenizer that was begun with.",
            fix=f"Remove the folder {work.path}, to begin again.",
        )
    return _planned(made, ranges, tokenizer, request.options)


def _planned(made: Plan, ranges: list[Range], tokenizer: Tokenizer, options: Options) -> Planned:
    return Planned(
        ranges,
        Packing(
            tokenizer, made.assignment, options.on_bad_row, options.mask_field, options.duplicates
        ),
        made.rule,
    )


def _tokenizer(spec: str, made: Plan, request: Request) -> Tokenizer:
    read = prompts_and_texts_of if request.options.mask_field else texts_of
    return make_tokenizer(
        spec,
        lambda limit: _some(sample_texts(made.jobs, limit, read), made.jobs, request),
        train_on=lambda limit: _some(
            texts_by_hash(made.training_jobs, limit, read), made.training_jobs, request
        ),
        pattern=request.options.pattern,
        end_of_text=request.options.end_of_text,
        cache=request.cache,
        progress=request.progress,
    )


def _some(texts: Iterator[str], jobs: Sequence[Job], request: Request) -> Iterator[str]:
    """Yield the texts.

    Raises: DataError when there is no document at all.
    """
    found = False
    for text in texts:
        found = True
        yield text
    if not found:
        left_out = Counter[str]()
        for row in chain.from_iterable(job.rows() for job in jobs):
            if not isinstance(row, Document):
                left_out[row.reason] += row.count if isinstance(row, LeftOut) else 1
        raise empty(" ".join(request.corpus.names), left_out.items())
