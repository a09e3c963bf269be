"""Datasets to read, a faulty store, and stub objects; makes `texts` importable."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from flatout.data.prepare.writer import DatasetWriter
from flatout.data.store.shards import Dataset
from flatout.progress import SILENT
from flatout.transfer import connection

sys.path.append(str(Path(__file__).parent))

CONTENT = b'{"stub": true}'


class StubTokenizer:
    """Enough of a tokenizer to write a dataset; every token is one letter."""

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

    def digest(self):
        return hashlib.sha256(CONTENT).hexdigest()


class FaultyStore(MemoryFileSystem):
    """A store in memory at faulty://; `asked` lists the requests.

    Each request removes the first of `faults`: an error to raise, or None. `tags` returns what the
    description of a file has besides its size.
    """

    protocol = "faulty"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    faults: ClassVar[list] = []
    asked: ClassVar[list] = []
    tags: ClassVar = lambda content: {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def _ask(self, what, path):
        self.asked.append(f"{what} {self._strip_protocol(path)}")
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault

    def _tagged(self, found):
        return found | (
            type(self).tags(self.store[found["name"]].getvalue()) if found["type"] == "file" else {}
        )

    def info(self, path, **kwargs):
        return self._tagged(super().info(path, **kwargs))

    def ls(self, path, detail=True, **kwargs):
        found = super().ls(path, detail=True, **kwargs)
        return [self._tagged(one) for one in found] if detail else [one["name"] for one in found]

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._ask("get", path)
        return super().cat_file(path, start=start, end=end, **kwargs)

    def put_file(self, lpath, rpath, **kwargs):
        self._ask("put", rpath)
        super().put_file(lpath, rpath, **kwargs)


@pytest.fixture
def store(monkeypatch):
    """Return an empty FaultyStore, without pauses between requests."""
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.0)
    yield FaultyStore()
    for left in (FaultyStore.store, FaultyStore.faults, FaultyStore.asked):
        left.clear()
    FaultyStore.pseudo_dirs[:] = [""]
    FaultyStore.tags = lambda content: {}


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
        train, val=(), *, ends=None, mask=None, vocab_size=300, shard_bytes=1 << 27, name="set"
    ):
        out = tmp_path / name
        with DatasetWriter(out, vocab_size=vocab_size, shard_bytes=shard_bytes) as writer:
            train = np.asarray(train)
            writer.train.append(
                train, [len(train)] if ends is None else ends, text_bytes=4 * len(train), mask=mask
            )
            if len(val):
                writer.val.append(np.asarray(val), [len(val)], text_bytes=4 * len(val))
            writer.finish(
                tokenizer=StubTokenizer(vocab_size), source={"kind": "test"}, split_rule="named"
            )
        return out

    return write


@pytest.fixture
def train_split(write_set):
    """Write a dataset, with the arguments of `write_set`, and open its train split."""
    return lambda *args, **kwargs: Dataset.open(write_set(*args, **kwargs)).split("train")
