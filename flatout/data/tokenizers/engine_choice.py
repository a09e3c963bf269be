"""Chooses gigatoken to encode a corpus where it gives the ids of `tokenizers`, much faster.

The tests prove that it does where the pattern of a tokenizer is a known one. Both are compared
again on the vocabulary, once per tokenizer and versions, and on text of the corpus. An engine that
is missing, fails or differs is skipped with a message. It is never an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np

from flatout.data.tokenizers.tokenizer import Tokenizer
from flatout.errors import FlatoutError
from flatout.progress import Progress
from flatout.storage.cache import default_cache

Announce: TypeAlias = Callable[[Tokenizer], object]
"""Is told of the tokenizer that a corpus is likely to be encoded with."""

WORTHWHILE_CHARACTERS = 4_000_000
"""With less text, encoding takes less time than finding a faster engine."""
CHECKED_CHARACTERS = 256_000
"""Approximate amount of text to compare engines on, spread evenly over the sample."""
CHUNK_CHARACTERS = 4096
PIECES = 4000
"""Pieces of a vocabulary that are compared as one text."""
SHOWN_CHARACTERS = 20


def choose_engine(
    tokenizer: Tokenizer,
    sample: Iterable[str],
    progress: Progress,
    announce: Announce = lambda _: None,
) -> Tokenizer:
    """Return the tokenizer with the fastest engine that gives its ids, and report the choice.

    `sample` yields text of the corpus. With less than WORTHWHILE_CHARACTERS of it, the tokenizer is
    returned unchanged. `announce` is told of the likely choice before engines are compared.
    """
    texts = _spread(sample) if tokenizer.engine == "tokenizers" else []
    if not texts:
        return tokenizer
    reason = (
        "gigatoken does not know how this tokenizer splits text, so this takes four to five times "
        "as long"
    )
    if tokenizer.layout is not None:
        fast = tokenizer.with_engine("gigatoken")
        announce(fast)
        ours = version("gigatoken")
        compared = cached("compared", tokenizer.digest(), ours, version("tokenizers"))
        try:
            fast.encode_piece("", 0)
            own = () if compared.exists() else vocabulary_texts(tokenizer)
            reason = difference(fast, tokenizer, chain(own, texts))
        except FlatoutError as error:
            reason = error.what.rstrip(".")
        if not reason:
            with suppress(OSError):
                compared.touch()
            size = sum(len(text.encode()) for text in texts) / 1e6
            progress.say(
                f"Encodes with gigatoken {ours} (same ids as tokenizers "
                f"on {size:.1f} MB of this text)."
            )
            return fast
    progress.say(f"Encodes with tokenizers {version('tokenizers')}: {reason}.")
    return tokenizer


def cached(kind: str, *stated: str) -> Path:
    """Return the path in the user's cache of what is made of a tokenizer, by all it depends on."""
    digest = hashlib.sha256("\n".join(stated).encode()).hexdigest()
    folder = default_cache().expanduser() / "tokenizers"
    with suppress(OSError):  # what cannot be kept is made again
        folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{digest[:32]}.{kind}"


def _spread(sample: Iterable[str]) -> list[str]:
    """Return evenly spread chunks of the sample. None when it is too small.

    Halves of surrogate pairs are dropped here: packing reports them.
    """
    chunks: list[str] = []
    size = 0
    for text in sample:
        size += len(text)
        starts = range(0, len(text), CHUNK_CHARACTERS)
        chunks += (text[start : start + CHUNK_CHARACTERS] for start in starts)
    if size < WORTHWHILE_CHARACTERS:
        return []
    step = max(size // CHECKED_CHARACTERS, 1)
    return [chunk.encode(errors="ignore").decode() for chunk in chunks[::step]]


def difference(fast: Tokenizer, reference: Tokenizer, texts: Iterable[str]) -> str:
    """Return a description of the first difference in the ids of two engines. Empty if none.

    Panics, which are not Exceptions, are caught too: a slower engine may still encode the text.
    """
    for text in texts:
        why = ""
        try:
            same = np.array_equal(reference.encode_piece(text, 0), fast.encode_piece(text, 0))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            same, why = False, f" ({error})"
        if not same:
            return f"{fast.engine} differs at {text[:SHOWN_CHARACTERS]!a}{why}"
    return ""


def vocabulary_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield every piece of the vocabulary that is text, alone and next to its neighbours."""
    pieces = (tokenizer.decode_bytes([index]) for index in range(tokenizer.vocab_size))
    words = [
        text
        for piece in pieces
        if "\ufffd" not in (text := piece.decode("utf-8", errors="replace"))
    ]
    for start in range(0, len(words), PIECES):
        some = words[start : start + PIECES]
        yield "\n".join(some)
        yield "".join(some[::3])
