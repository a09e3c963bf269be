"""Datasets to read, a faulty store, and stub objects; makes `texts` importable."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
from failing_proxy import between  # noqa: F401
from faulty_store import store  # noqa: F401

from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.store.shards import Dataset
from flatout.progress import SILENT
from flatout.storage import files

sys.path.append(str(Path(__file__).parent))

from prepared import write_rows

CONTENT = b'{"stub": true}'


class StubTokenizer:
    """Enough of a tokenizer to write a dataset. Every token is one letter."""

    engine = "stub"

    name = "stub"
    eot_id = 0

    def __init__(self, vocab_size=300):
        self.vocab_size = vocab_size
        self.encoded: list[str] = []

    def encode(self, text):
        self.encoded.append(text)
        return [ord(c) - 1000 for c in text]

    def decode(self, ids):
        return "".join(chr(i + 1000) for i in ids)

    def save(self, path: Path):
        path.write_bytes(CONTENT)
        files.sync(path)

    def digest(self):
        return hashlib.sha256(CONTENT).hexdigest()


class Said:
    """A progress that records its lines."""

    def __init__(self):
        self.lines = []

    def task(self, what, **_):
        return SILENT.task(what)

    def say(self, line):
        self.lines.append(line)


@pytest.fixture
def said():
    """Return a progress that records its lines."""
    return Said()


@pytest.fixture
def stub_tokenizer():
    return StubTokenizer()


@pytest.fixture
def write_set(tmp_path):
    """Write a dataset of train (and val) tokens and return its directory.

    `ends` defaults to one document per split.
    """

    def write(
        train, val=(), *, ends=None, mask=None, vocab_size=300, shard_tokens=1 << 26, name="set"
    ):
        out = tmp_path / name
        with DatasetWriter(out, StubTokenizer(vocab_size), shard_tokens=shard_tokens) as writer:
            ends = [len(train)] if ends is None else ends
            size = 4 * len(train)
            writer.append("train", np.asarray(train), ends, text_bytes=size, mask=mask)
            counted = None if mask is None else np.ones(len(val), np.uint8)
            ends, size = [len(val)] * bool(len(val)), 4 * len(val)
            writer.append("val", np.asarray(val), ends, text_bytes=size, mask=counted)
            writer.finish(source={"kind": "test"}, split_rule="named")
        return out

    return write


@pytest.fixture
def train_split(write_set):
    """Write a dataset, with the arguments of `write_set`, and open its train split."""
    return lambda *args, **kwargs: Dataset.open(write_set(*args, **kwargs)).split("train")


@pytest.fixture
def book(tmp_path):
    """A text file of one document."""
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Sentence {number} of the book. " for number in range(400)))
    return path


@pytest.fixture
def rows(tmp_path):
    """A JSONL file of 300 different documents of several lengths."""
    texts = (f"row {number} " * (number % 5 + 1) for number in range(300))
    return write_rows(tmp_path / "rows.jsonl", texts)
