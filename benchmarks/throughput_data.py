"""The datasets that throughput.py trains on, made quickly and offline."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flatout import prepare
from flatout.data.prepare.writer import DatasetWriter
from flatout.data.tokenizers.char import CharTokenizer

FIRST_CHARACTER = 0x20
"""At least 50,256 characters follow this one, none of them a surrogate."""
LENGTHS = (200, 1800)
"""Minimum and maximum document length in tokens."""


def random_data(out: Path, *, tokens: int, vocabulary: int, val_tokens: int = 4_096) -> Path:
    """Write a packed dataset of random tokens in documents of random lengths; return its path.

    Tokens are drawn uniformly from the first half of the vocabulary. A model that trains learns
    this, and its loss falls from about ln V towards ln(V / 2). Each token id stands for one
    character, so that tokens can be decoded to text.
    """
    tokenizer = CharTokenizer(
        "".join(map(chr, range(FIRST_CHARACTER, FIRST_CHARACTER + vocabulary - 1)))
    )
    rng = np.random.default_rng(0)
    with DatasetWriter(out, vocab_size=vocabulary) as writer:
        for split, count in ((writer.train, tokens), (writer.val, val_tokens)):
            drawn = rng.integers(0, vocabulary // 2, count, dtype=np.uint16)
            lengths = rng.integers(*LENGTHS, count // LENGTHS[0] + 1)
            ends = np.append(np.cumsum(lengths)[np.cumsum(lengths) < count], count)
            drawn[ends - 1] = tokenizer.eot_id
            split.append(drawn, ends, text_bytes=2 * count)
        writer.finish(tokenizer=tokenizer, source={"kind": "random"}, split_rule="named")
    return out


def text_data(out: Path, *, vocabulary: int, max_bytes: int | None = None) -> Path:
    """Prepare Python's standard library with a tokenizer trained on it; return the dataset's path.

    The vocabulary is as large as that of the random tokens. Runs that tokenise in the step use it:
    random tokens would hide that cost.
    """
    prepare("python-stdlib", out, tokenizer=f"train:{vocabulary}", max_bytes=max_bytes)
    return out


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/throughput.py; run: python benchmarks/throughput.py --help"
    )
