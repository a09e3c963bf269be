"""What is packed, and how it is split, decided before any text is tokenised: limits, the split
rule.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from flatout.data.prepare.tokenize import (
    Assignment,
    ByHash,
    ByPlace,
    Job,
    OnBadRow,
    Skipped,
    Whole,
    cut_to_bytes,
    hash_fraction,
    num_bytes_of,
    skip_or_raise,
)
from flatout.errors import DataError, TooLittleText
from flatout.progress import SILENT, Progress
from flatout.sources import BadRow, LeftOut, ReadTask

NAMED = "named"
"""The split rule where validation is text of its own."""
MANY_DOCUMENTS = 1000
"""From here on, and when no rule is stated, one document in a hundred is enough for validation."""
FEW_DOCUMENTS = 100
SMALL_FRACTION = 0.05
"""In between, one in twenty."""
NEAR = 0.05
"""A tail begins with a whole document when that changes its share by at most this part of it; else
a document is cut.
"""


@dataclass(frozen=True)
class Plan:
    """Which documents, and where each goes."""

    jobs: tuple[Job, ...]
    """Those of validation text of its own come first."""
    rule: str
    assignment: Assignment

    @property
    def training_jobs(self) -> tuple[Job, ...]:
        """The jobs that training text comes from: all but those of validation text of its own."""
        return tuple(job for job in self.jobs if job.assignment is None)


@dataclass
class _Survey:
    """What a first look at the documents found, as far as it went."""

    taken: list[int]
    """Documents to take of each part looked at."""
    last_bytes: int | None = None
    """Bytes to keep of the last document taken, when the byte limit cuts it."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Characters of each document taken."""
    sides: set[bool] = field(default_factory=set)
    """Whether hashes are below SMALL_FRACTION: both answers, once there is a document for each."""
    documents: int = 0
    stopped: Literal["at the end", "at a limit", "knowing enough"] = "at the end"


def make_plan(
    parts: Sequence[ReadTask],
    *,
    split: str | None,
    max_documents: int | None = None,
    max_bytes: int | None = None,
    on_bad_row: OnBadRow = "raise",
    progress: Progress = SILENT,
    name: str = "The text",
) -> Plan:
    """Return the plan for some parts, which are called `name` in messages.

    `split` is `tail F` or `hash F`. `tail F` takes the end, from character int(n * (1 - F)) on, n
    the characters of all documents; the document it falls into is cut there, unless its beginning
    or its end would do as well (`NEAR`). `hash F` takes a fraction F of the documents by their
    text. Not stated, it is `tail 0.1` below 100 documents, `hash 0.05` below 1,000, `hash 0.01`
    from there on.

    Documents are taken in order, up to `max_documents`, and until their text reaches `max_bytes`;
    the last one is cut there.

    Raises: DataError when the rule is not one, there is no document, or a split would be empty.
    """
    kind, fraction = parse_rule(split) if split is not None else (None, 0.0)
    limited = max_documents is not None or max_bytes is not None
    if kind == "hash" and not limited:
        return Plan(tuple(Job(part) for part in parts), f"hash {fraction:g}", ByHash(fraction))
    enough = None if kind is not None or limited else MANY_DOCUMENTS
    with progress.task("Counting documents", unit="documents") as task:
        found = _look(parts, max_documents, max_bytes, enough, on_bad_row, task.advance)
    if not found.documents:
        return Plan(tuple(Job(part) for part in parts), split or "none", ByHash(0.0))
    if kind is None:
        kind, fraction = _usual_rule(found)
    assignment = ByHash(fraction) if kind == "hash" else _tail(fraction, found, name)
    return Plan(_jobs(parts, found), f"{kind} {fraction:g}", assignment)


def make_named_plan(
    parts: Sequence[ReadTask],
    validation: Sequence[ReadTask],
    *,
    max_documents: int | None = None,
    max_bytes: int | None = None,
    on_bad_row: OnBadRow = "raise",
    progress: Progress = SILENT,
) -> Plan:
    """Return the plan for some parts to train on, up to the limits that `make_plan` knows, and
    others to validate on, which are taken whole.
    """
    jobs = tuple(Job(part) for part in parts)
    if max_documents is not None or max_bytes is not None:
        with progress.task("Counting documents", unit="documents") as task:
            jobs = _jobs(
                parts, _look(parts, max_documents, max_bytes, None, on_bad_row, task.advance)
            )
    return Plan((*held_out(validation), *jobs), NAMED, Whole("train"))


def held_out(parts: Sequence[ReadTask]) -> tuple[Job, ...]:
    """Return the jobs of text that is for validation alone."""
    return tuple(Job(part, assignment=Whole("val")) for part in parts)


def parse_rule(text: str) -> tuple[str, float]:
    """Return the kind and the fraction of a split rule.

    Raises: DataError when it is not one.
    """
    match = re.fullmatch(r"\s*(tail|hash)[\s:=]+([0-9.eE-]+)\s*", text)
    try:
        kind, fraction = (match[1], float(match[2])) if match else ("", 0.0)
    except ValueError:
        kind, fraction = "", 0.0
    if not 0 < fraction < 1:
        raise DataError(
            f"{text!r} is not a split rule.",
            fix="Write 'tail 0.1' (the last tenth) or 'hash 0.01' (one document in a hundred).",
        )
    return kind, fraction


def _usual_rule(found: _Survey) -> tuple[str, float]:
    if found.documents >= MANY_DOCUMENTS:
        return "hash", 0.01
    if found.documents >= FEW_DOCUMENTS and len(found.sides) == 2:
        return "hash", SMALL_FRACTION
    return "tail", 0.1


def _tail(fraction: float, found: _Survey, name: str) -> Assignment:
    """Return the assignment of `tail F`; the product is the usual int(n * 0.9), so that figures
    compare with others'.
    """
    total = sum(found.lengths)
    first_val = int(total * (1 - fraction))
    if not 0 < first_val < total:
        unit = "character" if total == 1 else "characters"
        raise TooLittleText(
            f"{name}: {total} {unit} cannot be split by 'tail {fraction:g}', one side would be empty.",
            fix="Add text, or set --split 'tail 0.5'." if total > 1 else "Add text.",
        )
    starts = array("q", accumulate(found.lengths, initial=0))
    holder = bisect_right(starts, first_val) - 1
    edge = min((holder, holder + 1), key=lambda document: abs(starts[document] - first_val))
    if 0 < starts[edge] < total and abs(starts[edge] - first_val) <= NEAR * (total - first_val):
        return ByPlace(edge, 0)
    return ByPlace(holder, first_val - starts[holder])


def _look(
    parts: Sequence[ReadTask],
    max_documents: int | None,
    max_bytes: int | None,
    enough: int | None,
    on_bad_row: OnBadRow,
    count: Callable[[], None],
) -> _Survey:
    """Read the documents, without tokenising, as far as the limits allow, or until there are
    `enough`.
    """
    found = _Survey(taken=[])
    room = max_bytes
    for part in parts:
        found.taken.append(0)
        for row in part.rows():
            if isinstance(row, BadRow):
                skip_or_raise(row, Skipped(), on_bad_row)
            if isinstance(row, BadRow | LeftOut):
                continue
            count()
            found.taken[-1] += 1
            found.documents += 1
            found.lengths.append(len(row.text))
            if len(found.sides) < 2:
                found.sides.add(hash_fraction(row.text) < SMALL_FRACTION)
            if room is not None:
                size = num_bytes_of(row.text)
                if size >= room:
                    found.last_bytes, found.lengths[-1] = room, len(cut_to_bytes(row.text, room))
                    found.stopped = "at a limit"
                    return found
                room -= size
            if found.documents in (max_documents, enough):
                found.stopped = (
                    "at a limit" if found.documents == max_documents else "knowing enough"
                )
                return found
    return found


def _jobs(parts: Sequence[ReadTask], found: _Survey) -> tuple[Job, ...]:
    if found.stopped == "knowing enough":
        return tuple(Job(part) for part in parts)
    jobs: list[Job] = []
    first = 0
    for part, taken in zip(parts, found.taken, strict=False):
        jobs.append(Job(part, first))
        first += taken
    if found.stopped == "at a limit":
        jobs[-1] = replace(jobs[-1], take=found.taken[-1], last_bytes=found.last_bytes)
    return tuple(jobs)


def empty(names: str, left_out: Iterable[tuple[str, int]]) -> DataError:
    """Return the error for a corpus without a document."""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out)
    return TooLittleText(
        f"{names} holds no document{f' ({reasons})' if reasons else ''}.",
        fix="Name a file or folder with text in it.",
    )
