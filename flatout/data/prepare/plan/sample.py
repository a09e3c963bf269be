"""Samples of a corpus, to train or check a tokenizer on."""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Callable, Iterator, Sequence

from flatout.data.prepare.pack.work_items import sha256_of
from flatout.data.sources import Document, ReadTask
from flatout.data.sources.long import Text, chunks_of

SPREAD_TASKS = 64
"""Maximum read tasks that a bounded sample is taken from."""
STRIPES = 8
"""Stripes taken from a long document. Also the minimum number of long documents in a sample."""
READ_PER_BYTE = 16
"""Maximum bytes read per byte chosen by hash: choosing from all text means reading all of it."""


Reading = Callable[[ReadTask], Iterator[Text]]
"""Yields the texts of a task that are packed: `texts_of` or `prompts_and_texts_of`."""


def texts_of(task: ReadTask) -> Iterator[Text]:
    """Yield the texts of a task's documents."""
    return (row.text for row in task.rows() if isinstance(row, Document))


def prompts_and_texts_of(task: ReadTask) -> Iterator[Text]:
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


def sample_texts(
    tasks: Sequence[ReadTask], limit: int | None, read: Reading = texts_of
) -> Iterator[str]:
    """Yield all texts, long ones in chunks. With a limit, about that many characters of them.

    A bounded sample is spread evenly over the tasks and over long texts. Unusable rows are skipped
    here. Packing reports them.
    """
    if limit is None:
        yield from (chunk for task in tasks for text in read(task) for chunk in chunks_of(text))
        return
    count = min(len(tasks), SPREAD_TASKS)
    room = limit
    for number in range(count):
        budget = room // (count - number)
        for text in read(tasks[number * len(tasks) // count]):
            found = _stripes(text, budget)
            budget -= len(found)
            room -= len(found)
            yield found
            if budget <= 0:
                break


def texts_by_hash(tasks: Sequence[ReadTask], limit: int, read: Reading = texts_of) -> Iterator[str]:
    """Yield the documents, or about `limit` characters of those with the lowest hashes.

    Documents longer than both an eighth of the limit and a fair share contribute evenly spread
    stripes. The sample therefore depends on the documents alone, not on their order or division
    into tasks. This is true of a corpus of up to `READ_PER_BYTE` times the limit. Of a larger one,
    that much is read, with tasks in the order of a hash of their indices, and sampled.
    """
    chosen = _LowestHashes(limit)
    for text in _read(tasks, READ_PER_BYTE * limit, chosen, read):
        chosen.add(text)
    yield from chosen.shares()


def _read(
    tasks: Sequence[ReadTask], limit: int, chosen: _LowestHashes, read: Reading
) -> Iterator[Text]:
    """Yield texts up to `limit` characters, or more until there are enough to choose from."""
    order = sorted(range(len(tasks)), key=lambda number: hashlib.sha256(b"%d" % number).digest())
    for number in order:
        for text in read(tasks[number]):
            if limit <= 0 and chosen.is_full:
                return
            limit -= len(text)
            yield text


class _LowestHashes:
    """The documents with the lowest hashes that fill the limit, each counting up to its share."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._share = max(limit // STRIPES, 1)
        self._held: list[tuple[bytes, str]] = []
        """Hash and text, cut to the limit, of each document, in the order of the hashes."""
        self._weight = 0

    @property
    def is_full(self) -> bool:
        """Whether there is enough text."""
        return self._weight >= self._limit

    def add(self, text: Text) -> None:
        """Add a document, and drop those whose hashes are no longer low enough."""
        sha256 = sha256_of(text)
        if self.is_full and sha256 >= self._held[-1][0]:
            return
        candidate = (sha256, _stripes(text, self._limit))
        insort(self._held, candidate)
        self._weight += self._weight_of(candidate)
        while self._weight - self._weight_of(self._held[-1]) >= self._limit:
            self._weight -= self._weight_of(self._held.pop())

    def _weight_of(self, candidate: tuple[bytes, str]) -> int:
        return min(len(candidate[1]), self._share)

    def shares(self) -> Iterator[str]:
        """Yield each document's share, shortest first: longer ones use the unused rest."""
        room = self._limit
        texts = sorted((text for _, text in self._held), key=lambda text: (len(text), text))
        for left, text in zip(range(len(texts), 0, -1), texts, strict=True):
            found = _stripes(text, max(room // left, self._share))
            room -= len(found)
            yield found


def _stripes(text: Text, budget: int) -> str:
    """Return the text, or, if it exceeds the budget, evenly spread stripes of it."""
    if len(text) <= budget:
        return "".join(chunks_of(text))
    length = max(budget // STRIPES, 1)
    starts = [(len(text) - length) * index // (STRIPES - 1) for index in range(STRIPES)]
    stripes = [""] * STRIPES
    position = 0
    for chunk in chunks_of(text):
        for index, start in enumerate(starts):
            stripes[index] += chunk[max(start - position, 0) : max(start + length - position, 0)]
        position += len(chunk)
    return "\n".join(stripes)
