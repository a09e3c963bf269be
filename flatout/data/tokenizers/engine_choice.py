"""Chooses the fastest engine whose ids equal those of the reference engine.

The tests prove that engines agree where the pattern of a tokenizer is a known one, and only such a
tokenizer has more than one. They are compared again on the vocabulary, once for each tokenizer and
version, and on text of the corpus: an engine that is missing, fails or differs is skipped with a
message. It is never an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np

from flatout.data.tokenizers.base import Ids, Tokenizer
from flatout.data.tokenizers.engines import versioned
from flatout.errors import DataError, FlatoutError
from flatout.progress import Progress
from flatout.storage.cache import default_cache

WORTHWHILE_CHARACTERS = 4_000_000
"""With less text, encoding takes less time than finding a faster engine."""
CHECKED_CHARACTERS = 256_000
"""Approximate amount of text to compare engines on, spread evenly over the sample."""
CHUNK_CHARACTERS = 4096
PIECES = 4000
"""Pieces of a vocabulary that are compared as one text."""
SHOWN_CHARACTERS = 20


def choose_engine(tokenizer: Tokenizer, sample: Iterable[str], progress: Progress) -> Tokenizer:
    """Return the tokenizer with the fastest engine that gives its ids, and report the choice.

    `sample` yields text of the corpus. With less than WORTHWHILE_CHARACTERS of it, the tokenizer is
    returned unchanged.
    """
    *faster, slowest = tokenizer.engines or ("",)
    texts = _spread(sample) if faster else []
    if not texts:
        return tokenizer
    digest = tokenizer.digest()  # first, so that the copies below have its text too
    reference = tokenizer.with_engine(slowest)
    skipped: list[str] = []
    for engine in faster:
        candidate = reference.with_engine(engine)
        try:
            name = versioned(engine)
            candidate.encode_piece("", 0)
            versions = [name, versioned(slowest)]
            verdict = _verdict_path(digest, *versions)
            vocabulary = () if verdict.is_file() else _vocabulary(reference)
            reason = difference(candidate, reference, chain(vocabulary, texts))
        except FlatoutError as error:
            reason = error.what.rstrip(".")
        if not reason:
            with suppress(OSError):  # the vocabulary is compared again next time
                verdict.parent.mkdir(parents=True, exist_ok=True)
                verdict.write_text(json.dumps({"engines": versions}) + "\n", encoding="utf-8")
            size = sum(len(text.encode()) for text in texts) / 1e6
            same = f"encodes with {name} (same ids as {slowest} on {size:.1f} MB of this text)."
            progress.say(_sentence(skipped, same))
            return candidate
        skipped.append(reason)
    progress.say(_sentence(skipped, f"encodes with {slowest}."))
    return reference


def _verdict_path(*facts: str) -> Path:
    """Return the path of the file that exists once engines gave equal ids for a vocabulary."""
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return default_cache().expanduser() / "tokenizers" / f"{key[:32]}.json"


def _sentence(skipped: list[str], choice: str) -> str:
    return "; ".join(skipped) + f": {choice}" if skipped else choice[0].upper() + choice[1:]


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


def difference(candidate: Tokenizer, reference: Tokenizer, texts: Iterable[str]) -> str:
    """Return a description of the first difference in the ids of two engines. Empty if none."""
    for text in texts:
        expected, actual = (_ids_or_error(each, text) for each in (reference, candidate))
        if isinstance(expected, str) and isinstance(actual, str):
            continue
        if isinstance(actual, str):
            why = f" ({actual})"
        elif isinstance(expected, str):
            why = f" (it does not fail, and {reference.engine} does: {expected})"
        elif not np.array_equal(expected, actual):
            why = ""
        else:
            continue
        shown = text[:SHOWN_CHARACTERS]
        return f"{candidate.engine} differs from {reference.engine} at {shown!a}{why}"
    return ""


def _ids_or_error(tokenizer: Tokenizer, text: str) -> Ids | str:
    """Return the ids, or the error as text.

    Panics, which are not Exceptions, are caught too: a slower engine may still encode the text.
    """
    try:
        return tokenizer.encode_piece(text, 0)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except DataError as error:
        return error.what.rstrip(".")
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _vocabulary(tokenizer: Tokenizer) -> Iterator[str]:
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
