"""Decide which documents to take and how to split them, before any text is tokenised."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from flatout.data.prepare.pack.jobs import (
    Assignment,
    ByHash,
    ByPosition,
    Job,
    Whole,
    cut_to_bytes,
    hash_fraction,
    make_ranges,
    num_bytes_of,
)
from flatout.data.prepare.plan.work_plan import WorkPlan, validation_jobs
from flatout.data.prepare.request.inputs import Corpus
from flatout.data.prepare.request.options import NAMED, Options, parse_rule
from flatout.errors import TooLittleText
from flatout.progress import SILENT, Progress
from flatout.sources import BadRow, LeftOut, ReadTask

MANY_DOCUMENTS = 1000
"""With this many documents or more, one in a hundred is validation by default."""
FEW_DOCUMENTS = 100
SMALL_FRACTION = 0.05
"""The default fraction between FEW_DOCUMENTS and MANY_DOCUMENTS."""
NEAR = 0.05
"""A tail starts at a whole document if that changes its size by at most this fraction of it."""


@dataclass
class _Survey:
    """Results of a first pass over the documents, which may stop early."""

    taken: list[int] = field(default_factory=list)
    """Documents to take from each read task."""
    last_bytes: int | None = None
    """Bytes to keep of the last document, when the byte limit cuts it."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Characters of each document."""
    sides: set[bool] = field(default_factory=set)
    """Whether hashes are below SMALL_FRACTION: both values once both sides have a document."""
    stopped: Literal["at the end", "at a limit", "with enough"] = "at the end"


def make_plan(corpus: Corpus, options: Options, progress: Progress = SILENT) -> WorkPlan:
    """Return the work plan of a corpus.

    Documents are taken in order, up to `max_documents`, and until their text reaches `max_bytes`;
    the last one is cut there. Separate validation text is taken whole.

    `tail F` takes the end as validation, starting at character int(n * (1 - F)) of the n characters
    of all documents. It cuts the document there, unless its start or end is close enough (`NEAR`).
    A conversation is never cut.
    `hash F` takes a fraction F of the documents by the hash of their text. The default is `tail
    0.1` below 100 documents, `hash 0.05` below 1,000, else `hash 0.01`.

    Raises: DataError when the split rule is invalid or a split would be empty.
    """
    limited = options.max_documents is not None or options.max_bytes is not None
    tasks = corpus.read_tasks
    jobs = tuple(map(Job, tasks))
    if corpus.validation is not None:
        if limited:
            jobs = _jobs(tasks, _survey(tasks, options, None, progress))
        jobs = (*validation_jobs(corpus.validation.read_tasks), *jobs)
        return WorkPlan(make_ranges(jobs), NAMED, Whole("train"))
    kind, fraction = parse_rule(corpus.split) if corpus.split is not None else ("", 0.0)
    if kind == "hash" and not limited:
        return WorkPlan(make_ranges(jobs), f"hash {fraction:g}", ByHash(fraction))
    found = _survey(tasks, options, None if kind or limited else MANY_DOCUMENTS, progress)
    if not found.lengths:
        return WorkPlan(make_ranges(jobs), corpus.split or "none", ByHash(0.0))
    if not kind:
        kind, fraction = _default_rule(found)
    names = " ".join(corpus.names)
    assignment = ByHash(fraction) if kind == "hash" else _tail(fraction, found, names)
    if options.chat is not None and isinstance(assignment, ByPosition):
        assignment = _between_documents(assignment, len(found.lengths), names)
    return WorkPlan(make_ranges(_jobs(tasks, found)), f"{kind} {fraction:g}", assignment)


def _default_rule(found: _Survey) -> tuple[str, float]:
    if len(found.lengths) >= MANY_DOCUMENTS:
        return "hash", 0.01
    if len(found.lengths) >= FEW_DOCUMENTS and len(found.sides) == 2:
        return "hash", SMALL_FRACTION
    return "tail", 0.1


def _tail(fraction: float, found: _Survey, names: str) -> Assignment:
    """Return the assignment of `tail F`; `tail 0.1` cuts at int(n * 0.9), as is customary."""
    total = sum(found.lengths)
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
    if 0 < starts[edge] < total and abs(starts[edge] - first_val) <= NEAR * (total - first_val):
        return ByPosition(edge, 0)
    return ByPosition(holder, first_val - starts[holder])


def _between_documents(cut: ByPosition, count: int, names: str) -> ByPosition:
    """Return the assignment of a tail that starts with a whole document."""
    if count < 2:
        raise TooLittleText(
            f"{names}: a single conversation cannot be split.",
            fix="Add conversations, or name others for validation with --val.",
        )
    return ByPosition(min(max(cut.document, 1), count - 1), 0)


def _survey(
    tasks: Sequence[ReadTask], options: Options, enough: int | None, progress: Progress
) -> _Survey:
    """Read the documents without tokenising, up to the limits, or until there are `enough`."""
    found = _Survey()
    room = options.max_bytes
    with progress.task("Counting documents", unit="documents") as counter:
        for task in tasks:
            found.taken.append(0)
            for row in task.rows():
                if isinstance(row, BadRow) and options.on_bad_row == "raise":
                    raise row.error
                if isinstance(row, BadRow | LeftOut):
                    continue
                counter.advance()
                found.taken[-1] += 1
                found.lengths.append(len(row.text))
                if len(found.sides) < 2:
                    found.sides.add(hash_fraction(row.text) < SMALL_FRACTION)
                if room is not None:
                    size = num_bytes_of(row.text)
                    if size >= room:
                        found.last_bytes = room
                        found.lengths[-1] = len(cut_to_bytes(row.text, room))
                        found.stopped = "at a limit"
                        return found
                    room -= size
                count = len(found.lengths)
                if count in (options.max_documents, enough):
                    limit = count == options.max_documents
                    found.stopped = "at a limit" if limit else "with enough"
                    return found
    return found


def _jobs(tasks: Sequence[ReadTask], found: _Survey) -> tuple[Job, ...]:
    if found.stopped == "with enough":
        return tuple(map(Job, tasks))
    firsts = accumulate(found.taken, initial=0)
    jobs = [Job(task, first) for task, _, first in zip(tasks, found.taken, firsts, strict=False)]
    if found.stopped == "at a limit":
        jobs[-1] = replace(jobs[-1], take=found.taken[-1], last_bytes=found.last_bytes)
    return tuple(jobs)
