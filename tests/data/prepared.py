"""Prepared datasets for tests: what they contain, and what was reported on the way."""

import json
from contextlib import contextmanager

from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.store.shards import Dataset

HOW = {"workers", "engine", "progress", "cache", "from_file"}


class Listener:
    """A progress that records messages and steps."""

    def __init__(self):
        self.said = []
        self.tasks = []
        self.done = {}

    def say(self, line):
        self.said.append(line)

    @contextmanager
    def task(self, what, *, total=None, unit=""):
        self.tasks.append(what)
        listener = self

        class Task:
            def advance(self, amount=1):
                listener.done[what] = listener.done.get(what, 0) + amount

            def note(self, text):
                pass

        yield Task()


def write_rows(path, rows):
    """Write texts, or rows with further fields, as JSONL."""
    rows = ({"text": row} if isinstance(row, str) else row for row in rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(folder, name):
    """Return the texts of a split, decoded from its tokens."""
    dataset = Dataset.open(folder)
    split = dataset.split(name)
    tokens = split.read_tokens(0, split.num_tokens)
    starts = [0, *split.document_ends[:-1]]
    assert all(tokens[end - 1] == dataset.tokenizer.eot_id for end in split.document_ends)
    return [
        dataset.tokenizer.decode(tokens[start : end - 1])
        for start, end in zip(starts, split.document_ends, strict=True)
    ]


def prepared(*sources, out, **given):
    """Prepare a dataset, with the tokenizer byte; `given` are options, or say how to work."""
    how = {key: given.pop(key) for key in HOW & given.keys()}
    options = Options(**{"tokenizer": "byte"} | given)
    return prepare_dataset([str(source) for source in sources], out, options, **how)
