"""Documents generated from a seed, for experiments: `synthetic:documents=1000,words=200,seed=0`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from flatout.data.sources import Document, ReadTask, require_counts

DOCUMENTS_PER_PART = 1000
_ONSETS = [
    "b",
    "ch",
    "d",
    "f",
    "g",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ou"]
_ENDS = ["", "", "", "n", "r", "s", "l", "nd"]


def synthetic(documents: int = 1000, words: int = 200, seed: int = 0) -> list[ReadTask]:
    """Return the tasks of `documents` texts of about `words` words, determined by the parameters.

    Raises: DataError when a parameter is not an integer or is out of range.
    """
    require_counts("synthetic", documents=(documents, 1), words=(words, 1), seed=(seed, 0))
    starts = range(0, documents, DOCUMENTS_PER_PART)
    bounds = [(start, min(start + DOCUMENTS_PER_PART, documents)) for start in starts]
    return [
        ReadTask(
            write_documents,
            (first, last, words, seed),
            fingerprint=f"synthetic {first} {last} {words} {seed}",
            num_bytes=(last - first) * words * 6,
        )
        for first, last in bounds
    ]


SOURCE = synthetic


def write_documents(first: int, last: int, words: int, seed: int) -> Iterator[Document]:
    """Yield the documents with the numbers [first, last).

    Words are drawn from a vocabulary of 800 with the frequencies of natural text. Half of the words
    are followed by a fixed successor, so that there is something to learn.
    """
    vocabulary = _vocabulary(random.Random(f"words {seed}"))
    for number in range(first, last):
        draw = random.Random(f"document {seed} {number}").random
        yield Document(
            _text(draw, vocabulary, max(1, int(words * (0.5 + draw())))),
            f"synthetic document {number}",
        )


def _vocabulary(stream: random.Random) -> list[str]:
    def pick(choices: list[str]) -> str:
        return choices[int(stream.random() * len(choices))]

    words: dict[str, None] = {}
    while len(words) < 800:
        syllables = 1 + int(stream.random() * 3)
        words["".join(pick(_ONSETS) + pick(_VOWELS) + pick(_ENDS) for _ in range(syllables))] = None
    return list(words)


def _text(draw: Callable[[], float], vocabulary: list[str], count: int) -> str:
    sentences: list[str] = []
    word = 0
    while count > 0:
        length = min(count, 4 + int(draw() * 12))
        chosen = []
        for _ in range(length):
            word = (
                (word * 31 + 7) % len(vocabulary)
                if draw() < 0.5
                else int(len(vocabulary) ** draw()) - 1
            )
            chosen.append(vocabulary[word])
        count -= length
        sentences.append(" ".join(chosen).capitalize() + ".")
    return " ".join(sentences) + "\n"
