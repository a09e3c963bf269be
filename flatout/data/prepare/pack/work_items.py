"""Work items, which divide the documents of a corpus among processes and splits."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, Self

from pydantic import Field, InstanceOf

from flatout.data.sources import Document, ReadTask, Row
from flatout.data.store.manifest import SplitName
from flatout.data.tokenizers.engines import utf8
from flatout.storage.files import Stored
from flatout.storage.json_io import JsonObject


@dataclass(frozen=True)
class ByHash:
    """`hash F`: a document is validation text if its SHA-256 is in the lowest fraction F.

    The first 8 bytes, as a fraction of 2^64, are compared with F. Equal documents share a split,
    and a document keeps its split when others are added or removed. A prompt is a part of it, so
    that rows with equal answers, such as labels, do not all share a split.
    """

    fraction: float

    def assign(self, row: Document, index: int) -> Iterator[tuple[SplitName, str]]:
        """Yield the whole document with its split."""
        yield ("val" if hash_fraction(row.prompt + row.text) < self.fraction else "train"), row.text


@dataclass(frozen=True)
class ByPosition:
    """`tail F`: validation starts at a character of a document. Each side becomes a document."""

    document: int
    character: int

    def assign(self, row: Document, index: int) -> Iterator[tuple[SplitName, str]]:
        """Yield the whole document, or both sides of the one that is cut, with their splits."""
        text = row.text
        if index == self.document and self.character:
            yield "train", text[: self.character]
            yield "val", text[self.character :]
        else:
            yield ("train" if index < self.document else "val"), text


Assignment = ByHash | ByPosition
ALL_TRAIN, ALL_VAL = ByPosition(sys.maxsize, 0), ByPosition(0, 0)
"""`named`: validation starts after the last document, or with the first."""


def hash_fraction(text: str) -> float:
    """Return the text's hash as a number in [0, 1)."""
    digest = hashlib.sha256(utf8(text, "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class WorkItem(Stored):
    """Consecutive read tasks that one process packs at a time, into one range of the dataset."""

    number: int
    """Its index among the items, and that of its range."""
    num_tasks: int
    """How many read tasks of the corpus, after those of the items before it."""
    first: int
    """Index in the corpus of its first document. Used by `tail` only."""
    assignment: Assignment
    """Split of its documents."""
    read_tasks: tuple[InstanceOf[ReadTask], ...] = Field((), exclude=True)
    """Its read tasks, which plan.json does not contain."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes to read. 0 when unknown."""
        return sum(task.num_bytes for task in self.read_tasks)


class WorkPlan(Stored):
    """plan.json: the work items of a dataset, and the request that they were made for.

    Items of separate validation text come first.
    """

    format_version: Literal[3] = 3
    """Version of this file's format."""
    source: JsonObject = Field(default_factory=dict)
    """Description of the text, with every option that shapes the dataset."""
    tokenizer: str = ""
    """Digest of tokenizer.json, which is made from the text of the items."""
    rule: str
    """The split rule, as the manifest states it."""
    mtime_digest: str
    """Changes when a file of the text is rewritten."""
    task_bytes: tuple[int, ...]
    """Approximate bytes of each read task of the corpus."""
    take: int | None = None
    """Documents to take from the last read task of the items. None takes all."""
    last_bytes: int | None = None
    """UTF-8 bytes to keep of the last document taken. None keeps all of it."""
    items: tuple[WorkItem, ...]

    @property
    def read_tasks(self) -> tuple[ReadTask, ...]:
        """The read tasks of all items."""
        return tuple(task for item in self.items for task in item.read_tasks)

    def restore(self, read_tasks: Sequence[ReadTask]) -> Self:
        """Return the plan with the read tasks of its items, given those of the corpus."""
        tasks = list(read_tasks[: sum(item.num_tasks for item in self.items)])
        if self.take is not None:
            arguments = (tasks[-1], self.take, self.last_bytes)
            tasks[-1] = replace(tasks[-1], read=first_documents, arguments=arguments, skipped=())
        left = iter(tasks)
        items = (
            item.model_copy(update={"read_tasks": tuple(islice(left, item.num_tasks))})
            for item in self.items
        )
        return self.model_copy(update={"items": tuple(items)})


def first_documents(task: ReadTask, take: int, last_bytes: int | None) -> Iterator[Row]:
    """Yield the rows of a task up to the last document to take, of which `last_bytes` are kept."""
    taken = 0
    for row in task.rows():
        if isinstance(row, Document):
            taken += 1
            if taken == take and last_bytes is not None:
                row = replace(row, text=cut_to_bytes(row.text, last_bytes))
                if not row.text:
                    return
        yield row
        if taken == take:
            return


def num_bytes_of(text: str) -> int:
    """Return the length of the text in UTF-8 bytes."""
    return len(text) if text.isascii() else len(utf8(text, "replace"))


def cut_to_bytes(text: str, limit: int) -> str:
    """Return the longest prefix of the text that has at most `limit` bytes in UTF-8."""
    return text.encode("utf-8", errors="replace")[:limit].decode("utf-8", errors="ignore")
