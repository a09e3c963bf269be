"""Samples of a corpus, to train or check a tokenizer on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from flatout.data.sources import Document, ReadTask

SPREAD_TASKS = 64
"""Maximum read tasks that a bounded sample is taken from."""
STRIPES = 8
"""Stripes taken from a long document."""


Reading = Callable[[ReadTask], Iterator[str]]
"""Yields the texts of a task that are packed: `texts_of` or `prompts_and_texts_of`."""


def texts_of(task: ReadTask) -> Iterator[str]:
    """Yield the texts of a task's documents."""
    return (row.text for row in task.rows() if isinstance(row, Document))


def prompts_and_texts_of(task: ReadTask) -> Iterator[str]:
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
    """Yield all texts. With a limit, about that many characters of them.

    A bounded sample is spread evenly over the tasks and over long texts. Unusable rows are skipped
    here. Packing reports them.
    """
    if limit is None:
        yield from (text for task in tasks for text in read(task))
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


def _stripes(text: str, budget: int) -> str:
    """Return the text, or, if it exceeds the budget, evenly spread stripes of it."""
    if len(text) <= budget:
        return text
    length = max(budget // STRIPES, 1)
    starts = ((len(text) - length) * index // (STRIPES - 1) for index in range(STRIPES))
    return "\n".join(text[start : start + length] for start in starts)
