"""A split of documents to read."""

import hashlib

import numpy as np
import pytest

from flatout.data.prepare.writer import DatasetWriter
from flatout.data.store.shards import Dataset


class StubTokenizer:
    """Enough of a tokenizer to write a dataset with."""

    name, eot_id = "stub", 0

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def save(self, path):
        path.write_bytes(b"{}")

    def digest(self):
        return hashlib.sha256(b"{}").hexdigest()


@pytest.fixture
def train_split(tmp_path):
    """Write and open one training split of tokens; documents end at `ends`."""

    def make(tokens, *, ends, mask=None, vocab_size=300, shard_bytes=1 << 27):
        out, tokens = tmp_path / "set", np.asarray(tokens)
        with DatasetWriter(out, vocab_size=vocab_size, shard_bytes=shard_bytes) as writer:
            writer.train.append(tokens, ends, text_bytes=4 * len(tokens), mask=mask)
            writer.finish(
                tokenizer=StubTokenizer(vocab_size),
                source={"kind": "test"},
                split_rule="named",
            )
        return Dataset.open(out).split("train")

    return make
