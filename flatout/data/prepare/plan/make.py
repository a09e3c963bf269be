"""Make the work plan, or restore the one in the work directory.

The plan decides which documents to take, how to split them and which tokenizer to use, before any
text is tokenised.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat

from flatout.data.prepare.pack.range_files import count_skipped, no_documents
from flatout.data.prepare.pack.tokenize import Packing
from flatout.data.prepare.pack.work_items import (
    ALL_TRAIN,
    ALL_VAL,
    Assignment,
    ByHash,
    ByPosition,
    WorkItem,
    WorkPlan,
    cut_to_bytes,
    hash_fraction,
    num_bytes_of,
)
from flatout.data.prepare.plan.work_dir import WorkDir
from flatout.data.prepare.request.inputs import Corpus
from flatout.data.prepare.request.options import NAMED, Options, parse_rule
from flatout.data.prepare.request.request import Request, difference
from flatout.data.sources import BadRow, Document, LeftOut, ReadTask
from flatout.data.sources.files import advised
from flatout.data.store.manifest import SkippedRows
from flatout.data.tokenizers import Announce, Tokenizer, make_tokenizer
from flatout.errors import DataError, OutputInUse, TooLittleText
from flatout.progress import SILENT, Progress

RANGES = 64
"""Ranges of a corpus between 64 MiB and 4 GiB: enough for many cores to share the work evenly."""
MIN_RANGE_BYTES, MAX_RANGE_BYTES = 1 << 20, 64 << 20
"""Text of a range outside of these sizes: an interruption loses little."""
MAX_RANGES = 1024
"""Ranges of a larger corpus, at most twice as many as half of it: each has an open file."""
MANY_DOCUMENTS = 1000
"""With this many documents or more, one in a hundred is validation by default."""
FEW_DOCUMENTS = 100
SMALL_FRACTION = 0.05
"""The default fraction between FEW_DOCUMENTS and MANY_DOCUMENTS."""
SPREAD_TASKS = 64
"""Maximum read tasks that a bounded sample is taken from."""
STRIPES = 8
"""Stripes taken from a long document."""
NEAR = 0.05
"""A tail starts at a whole document if that changes its size by at most this fraction of it."""


def plan_work(work: WorkDir, request: Request, announce: Announce) -> tuple[WorkPlan, Packing]:
    """Return the stored work plan, or make and store one, and how to pack it.

    `announce` is told of the likely tokenizer, before it is checked.

    Raises: DataError when the stored plan is for a different dataset, naming the difference, or
            when no plan can be made.
    """
    plan = work.plan()
    if plan is not None and work.failed.exists():
        if change_of(work, plan, request) is not None:
            plan = None
        work.failed.unlink()
    if plan is None:
        own = make_plan(request.corpus, request.options, request.progress)
        tokenizer = _tokenizer(request.options.tokenizer, own, request, announce)
        made_for = {"source": request.source, "tokenizer": tokenizer.digest()}
        own = own.model_copy(update=made_for)
        plan = work.begin(own, tokenizer)
        if plan.model_dump() == own.model_dump():
            return own, Packing(tokenizer, request.options, work.path)
    check_same(work, plan, request)
    plan = plan.restore(request.corpus.all_read_tasks)
    tokenizer = _tokenizer(str(work.tokenizer), plan, request, announce)
    if tokenizer.digest() != plan.tokenizer:
        raise DataError(
            f"{work.tokenizer} is not the tokenizer that this work started with.",
            fix=f"Remove the directory {work.path} to start over.",
        )
    return plan, Packing(tokenizer, request.options, work.path)


def check_same(work: WorkDir, stored: WorkPlan, request: Request) -> None:
    """Check that the plan in the work directory is for the requested dataset.

    Raises: OutputInUse naming the difference; DataError when the text has changed since.
    """
    error = change_of(work, stored, request)
    if error is not None:
        raise error


def change_of(work: WorkDir, stored: WorkPlan, request: Request) -> DataError | None:
    """Return the error that names how the request differs from the stored plan, or None.

    How bad rows are handled may differ: the ranges that had some are packed again.
    """
    corpus = request.corpus
    different = difference(stored.source | {"on_bad_row": "raise"}, request.source)
    if not different and stored.task_bytes != tuple(
        task.num_bytes for task in corpus.all_read_tasks
    ):
        different = "its text is divided into other read tasks"
    if different:
        return OutputInUse(
            f"{work.path} contains an unfinished, different dataset: {different}.",
            fix="Request the same dataset, choose a different --out, or remove the directory "
            f"{work.path}, which discards the work done so far.",
        )
    if stored.mtime_digest != corpus.mtime_digest:
        return DataError(
            f"The text has changed since the work in {work.path} started: a file has a different "
            "size or modification time.",
            fix="Restore the text, including its modification times, or remove the directory "
            f"{work.path}, which discards the work done so far.",
        )
    return None


def _tokenizer(spec: str, plan: WorkPlan, request: Request, announce: Announce) -> Tokenizer:
    tasks = plan.read_tasks
    items = (item for item in plan.items if item.assignment != ALL_VAL)
    training = [task for item in items for task in item.read_tasks]

    def sample(limit: int | None) -> Iterator[str]:
        return _require_any(sample_texts(tasks, limit), tasks, request)

    def training_sample(limit: int) -> Iterator[str]:
        return _require_any(sample_texts(training, limit), training, request)

    return make_tokenizer(
        spec,
        sample,
        train_on=training_sample,
        pattern=request.options.pattern,
        end_of_text=request.options.end_of_text,
        progress=request.progress,
        announce=announce,
    )


def _require_any(
    texts: Iterator[str], tasks: Sequence[ReadTask], request: Request
) -> Iterator[str]:
    """Yield the texts.

    Raises: DataError when there are none.
    """
    first = next(texts, None)
    if first is None:
        skipped: list[SkippedRows] = []
        for row in chain.from_iterable(task.rows() for task in tasks):
            if not isinstance(row, Document):
                count_skipped(skipped, row.reason, (), row.count)
        raise no_documents(" ".join(request.source["names"]), skipped)
    yield first
    yield from texts


@dataclass
class _Survey:
    """Results of a first pass over the documents, which may stop early."""

    taken: list[int] = field(default_factory=list)
    """Documents to take from each read task."""
    take: int | None = None
    """Documents to take from the last of these tasks, when a limit ends the corpus there."""
    last_bytes: int | None = None
    """Bytes to keep of the last document, when the byte limit cuts it."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Characters of each document."""
    sides: set[bool] = field(default_factory=set)
    """Whether hashes are below SMALL_FRACTION: both values once both sides have a document."""


def make_plan(corpus: Corpus, options: Options, progress: Progress = SILENT) -> WorkPlan:
    """Return the work plan of a corpus.

    Documents are taken in order, up to `max_documents`, and until their text reaches `max_bytes`.
    The last one is cut there. Separate validation text is taken whole.

    `tail F` takes the end as validation, starting at character int(n * (1 - F)) of the n characters
    of all documents. It cuts the document there, unless its start or end is close enough (`NEAR`).
    A conversation is never cut, nor is an answer to a prompt.
    `hash F` takes a fraction F of the documents by the hash of their text. The default is `tail
    0.1` below 100 documents, `hash 0.05` below 1,000, else `hash 0.01`.

    Raises: DataError when the split rule is invalid or a split would be empty.
    """
    limited = options.max_documents is not None or options.max_bytes is not None
    tasks = corpus.read_tasks
    kind, fraction = parse_rule(corpus.split) if corpus.split is not None else ("", 0.0)
    found = _Survey()
    if limited or (corpus.validation is None and kind != "hash"):
        found = _survey(corpus, options, None if kind or limited else MANY_DOCUMENTS, progress)
    count = len(found.lengths)
    if not kind:
        kind, fraction = "tail", 0.1
        if count >= MANY_DOCUMENTS:
            kind, fraction = "hash", 0.01
        elif count >= FEW_DOCUMENTS and len(found.sides) == 2:
            kind, fraction = "hash", SMALL_FRACTION
    assignment: Assignment = ByHash(fraction)
    if corpus.validation is not None:
        assignment = ALL_TRAIN
    elif kind == "tail" and count:
        assignment = _tail(fraction, found, options, " ".join(corpus.names))
    if found.take is not None:
        tasks = tasks[: len(found.taken)]
    held_out = corpus.validation.read_tasks if corpus.validation else ()
    limit = range_bytes(task.num_bytes for task in (*held_out, *tasks))
    items = _items(held_out, ALL_VAL, repeat(0), 0, limit)
    items += _items(tasks, assignment, chain(found.taken, repeat(0)), len(items), limit)
    return WorkPlan(
        rule=f"{kind} {fraction:g}" if corpus.validation is None else NAMED,
        mtime_digest=corpus.mtime_digest,
        task_bytes=tuple(task.num_bytes for task in corpus.all_read_tasks),
        take=found.take,
        last_bytes=found.last_bytes,
        items=tuple(items),
    ).restore(corpus.all_read_tasks)


def range_bytes(task_bytes: Iterable[int]) -> int:
    """Return the text of a range: a function of the corpus, never of the workers."""
    total = sum(task_bytes)
    size = min(max(total // RANGES, MIN_RANGE_BYTES), MAX_RANGE_BYTES)
    while total > MAX_RANGES * size:
        size *= 2
    return size


def _items(
    tasks: Sequence[ReadTask],
    assignment: Assignment,
    documents: Iterable[int],
    number: int,
    limit: int,
) -> list[WorkItem]:
    """Return items of about `limit` bytes, numbered from `number`. `documents` are of each task.

    A task of unknown size is an item by itself.
    """
    counts: list[int] = []
    firsts: list[int] = []
    first = room = 0
    for task, count in zip(tasks, documents, strict=False):
        size = task.num_bytes or limit
        if size > room:
            counts.append(0)
            firsts.append(first)
            room = limit
        counts[-1] += 1
        room -= size
        first += count
    return [
        WorkItem(number=number + index, num_tasks=count, first=first, assignment=assignment)
        for index, (count, first) in enumerate(zip(counts, firsts, strict=True))
    ]


def _tail(fraction: float, found: _Survey, options: Options, names: str) -> ByPosition:
    """Return the assignment of `tail F`. `tail 0.1` cuts at int(n * 0.9), as is customary."""
    total, count = sum(found.lengths), len(found.lengths)
    first_val = int(total * (1 - fraction))
    if not 0 < first_val < total:
        unit = "character" if total == 1 else "characters"
        raise TooLittleText(
            f"{names}: {total} {unit} cannot be split by 'tail {fraction:g}': one split would be "
            "empty.",
            fix="Add text, or set --split 'tail 0.5'." if total > 1 else "Add text.",
        )
    starts = array("q", accumulate(found.lengths, initial=0))
    holder = bisect_right(starts, first_val) - 1
    edge = min((holder, holder + 1), key=lambda document: abs(starts[document] - first_val))
    is_near = abs(starts[edge] - first_val) <= NEAR * (total - first_val)
    cut = ByPosition(holder, first_val - starts[holder])
    if 0 < starts[edge] < total and is_near:
        cut = ByPosition(edge, 0)
    if not (options.chat or options.mask_field):
        return cut
    if count < 2:
        what = "conversation" if options.chat else "row"
        raise TooLittleText(
            f"{names}: a single {what} cannot be split.",
            fix=f"Add {what}s, or name others for validation with --val.",
        )
    return ByPosition(min(max(cut.document, 1), count - 1), 0)


def _survey(corpus: Corpus, options: Options, enough: int | None, progress: Progress) -> _Survey:
    """Read the documents without tokenising, up to the limits, or until there are `enough`."""
    found = _Survey()
    room = options.max_bytes
    with progress.task("Counting documents", unit="documents") as counter:
        for task in corpus.read_tasks:
            found.taken.append(0)
            for row in task.rows():
                if isinstance(row, BadRow) and options.on_bad_row == "raise":
                    raise advised(row.error, corpus.files)
                if isinstance(row, BadRow | LeftOut):
                    continue
                counter.advance()
                found.taken[-1] += 1
                found.lengths.append(len(row.text))
                if len(found.sides) < 2:
                    found.sides.add(hash_fraction(row.prompt + row.text) < SMALL_FRACTION)
                if room is not None:
                    size = num_bytes_of(row.text)
                    if size >= room:
                        found.last_bytes = room
                        found.lengths[-1] = len(cut_to_bytes(row.text, room))
                        found.take = found.taken[-1]
                        return found
                    room -= size
                if len(found.lengths) in (options.max_documents, enough):
                    found.take = None if enough else found.taken[-1]
                    return found
    return found


def texts_of(task: ReadTask) -> Iterator[str]:
    """Yield the prompts and the texts of a task's documents.

    A conversation is yielded in pieces, without its special tokens.
    """
    for row in task.rows():
        if isinstance(row, Document) and row.examples:
            for example in row.examples:
                yield from example.texts(0, len(example.text))
        elif isinstance(row, Document):
            if row.prompt:
                yield row.prompt
            yield row.text


def sample_texts(tasks: Sequence[ReadTask], limit: int | None) -> Iterator[str]:
    """Yield all texts. With a limit, about that many characters of them.

    A bounded sample is spread evenly over the tasks and over long texts. Unusable rows are skipped
    here. Packing reports them.
    """
    if limit is None:
        yield from (text for task in tasks for text in texts_of(task))
        return
    count = min(len(tasks), SPREAD_TASKS)
    room = limit
    for number in range(count):
        budget = room // (count - number)
        for text in texts_of(tasks[number * len(tasks) // count]):
            found = _stripes(text, budget)
            budget -= len(found)
            room -= len(found)
            yield found
            if budget <= 0:
                break


def _stripes(text: str, budget: int) -> str:
    """Return the text, or, if it exceeds the budget, evenly spread stripes of it."""
    if len(text) <= budget:
        return text
    length = max(budget // STRIPES, 1)
    starts = ((len(text) - length) * index // (STRIPES - 1) for index in range(STRIPES))
    return "\n".join(text[start : start + length] for start in starts)
