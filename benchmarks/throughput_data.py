"""The data sets that throughput.py trains on, made at once and offline."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flatout import prepare
from flatout.data.prepare.writer import DatasetWriter
from flatout.data.tokenizers.char import CharTokenizer

FIRST_CHARACTER = 0x20
"""From here on there are 50,256 characters and more, none of them half of a pair."""
LENGTHS = (200, 1800)
"""A document has so many tokens at least, and so many at most."""


def random_data(out: Path, *, tokens: int, vocabulary: int, val_tokens: int = 4_096) -> Path:
    """Write a packed data set of random tokens in documents of random lengths; return its folder.

    Each token is drawn evenly from the first half of the vocabulary: that half of it never comes is
    what there is to learn, so a model that trains falls from about ln V towards ln(V / 2). An id
    stands for one character, so that the tokens have a text.
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
    """Prepare Python's own standard library with a vocabulary trained on it, as many ids as the
    random tokens have; return the folder.

    It is for runs that tokenise text in the step, whose cost random tokens would not show.
    """
    prepare("python-stdlib", out, tokenizer=f"train:{vocabulary}", max_bytes=max_bytes)
    return out


if __name__ == "__main__":
    raise SystemExit(
        "It is a part of benchmarks/throughput.py, which is the command: python benchmarks/throughput.py --help"
    )
