"""The part of a corpus that a tokenizer is made from, or tried on."""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Callable, Iterator, Sequence

from flatout.data.prepare.tokenize import Job, sha256_of
from flatout.sources import Document
from flatout.sources.long import Text, chunks_of

SPREAD_PARTS = 64
STRIPES = 8
"""Of a document, places that are taken; and documents, at least, that a sample is of when none is
short.
"""
READ_PER_BYTE = 16
"""To choose a byte of text by hash, so many are read at most: choosing from all of a corpus takes
reading all of it.
"""


Reading = Callable[[Job], Iterator[Text]]
"""Which texts of a job are packed: `texts_of` or `prompts_and_texts_of`."""


def texts_of(job: Job) -> Iterator[Text]:
    """Yield the texts of a job's documents."""
    return (row.text for row in job.rows() if isinstance(row, Document))


def prompts_and_texts_of(job: Job) -> Iterator[Text]:
    """Yield the prompts and texts of a job's documents, each as a text of its own, as they are
    tokenised.
    """
    return (
        text
        for row in job.rows()
        if isinstance(row, Document)
        for text in ((row.prompt, row.text) if row.prompt else (row.text,))
    )


def sample_texts(jobs: Sequence[Job], limit: int | None, read: Reading = texts_of) -> Iterator[str]:
    """Yield the documents' texts, long ones in chunks; with a limit, about so much, from parts and
    places spread evenly over the corpus.

    Rows that cannot be used are passed over: packing them says so.
    """
    if limit is None:
        yield from (chunk for job in jobs for text in read(job) for chunk in chunks_of(text))
        return
    count = min(len(jobs), SPREAD_PARTS)
    room = limit
    for number in range(count):
        budget = room // (count - number)
        for text in read(jobs[number * len(jobs) // count]):
            found = _stripes(text, budget)
            budget -= len(found)
            room -= len(found)
            yield found
            if budget <= 0:
                break


def texts_by_hash(jobs: Sequence[Job], limit: int, read: Reading = texts_of) -> Iterator[str]:
    """Yield the documents, or, where they have more than `limit` characters, about so much of those
    whose texts' hashes are the lowest.

    Those that are longer than an eighth of it, and than a fair share, give stripes from evenly
    spread places. So the sample follows from the documents alone, in whatever order and parts they
    come. That holds for a corpus of `READ_PER_BYTE` times the limit; of a larger one so much is
    read, parts in the order of a hash of their places, and the sample chosen from that.
    """
    chosen = _Chosen(limit)
    for text in _read(jobs, READ_PER_BYTE * limit, chosen, read):
        chosen.add(text)
    yield from chosen.shares()


def _read(jobs: Sequence[Job], most: int, chosen: _Chosen, read: Reading) -> Iterator[Text]:
    """Yield texts until there are `most` characters, and enough to choose from."""
    for number in sorted(
        range(len(jobs)), key=lambda number: hashlib.sha256(b"%d" % number).digest()
    ):
        for text in read(jobs[number]):
            if most <= 0 and chosen.is_full:
                return
            most -= len(text)
            yield text


class _Chosen:
    """The documents with the lowest hashes, as many as fill the limit when none counts for more
    than its share of it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._share = max(limit // STRIPES, 1)
        self._held: list[tuple[bytes, str]] = []
        """Hash and text, or as much of it as there may be of all, in order."""
        self._weight = 0

    @property
    def is_full(self) -> bool:
        """Whether there is text enough."""
        return self._weight >= self._limit

    def add(self, text: Text) -> None:
        """Take a document in, and let those go that no longer belong."""
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
        """Yield what there is to be of each, the shortest first: what they leave of the limit goes
        to the longer ones.
        """
        room = self._limit
        texts = sorted((text for _, text in self._held), key=lambda text: (len(text), text))
        for left, text in zip(range(len(texts), 0, -1), texts, strict=True):
            found = _stripes(text, max(room // left, self._share))
            room -= len(found)
            yield found


def _stripes(text: Text, budget: int) -> str:
    """Return the text, or when it is over the budget, stripes of it from evenly spread places."""
    if len(text) <= budget:
        return "".join(chunks_of(text))
    length = max(budget // STRIPES, 1)
    starts = [(len(text) - length) * index // (STRIPES - 1) for index in range(STRIPES)]
    stripes = [""] * STRIPES
    place = 0
    for chunk in chunks_of(text):
        for index, start in enumerate(starts):
            stripes[index] += chunk[max(start - place, 0) : max(start + length - place, 0)]
        place += len(chunk)
    return "\n".join(stripes)
