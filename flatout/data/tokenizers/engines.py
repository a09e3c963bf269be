"""The packages that encode text. The choice affects the speed, never the ids (`engine_choice`).

An encoder takes text and returns its ids. It knows no special tokens, and raises UnicodeEncodeError
for half of a surrogate pair.
"""

from __future__ import annotations

import json
import re
import tempfile
import unicodedata
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

import numpy as np
import psutil

from flatout.data.sources.long import utf8
from flatout.data.tokenizers.base import Document, Encode, Ids
from flatout.errors import DataError, MissingPackage

if TYPE_CHECKING:
    from gigatoken.gigatoken_rs import BPETokenizer, SentencePieceTokenizer

GROWTH_CHECK_BYTES = 1_000_000
"""Bytes of text between two checks of the memory of the process."""
MAX_GROWTH_BYTES = 32 << 20
"""gigatoken caches every word it meets. It is reloaded when the process has grown by this much."""

_LAST_ALTERNATIVES = re.compile(r"\|\\s\+(\+\$|\(\?!)")
r"""Where the known patterns continue with `|\s++$` or `|\s+(?!`, for white space."""
_NO_IDS = np.zeros(0, np.uint32)


def versioned(engine: str) -> str:
    """Return an engine's name and version.

    Raises: MissingPackage when it is not installed.
    """
    try:
        return f"{engine} {metadata.version(engine)}"
    except metadata.PackageNotFoundError as error:
        raise not_installed(engine) from error


def not_installed(engine: str) -> MissingPackage:
    """Return the error for an engine that is not installed."""
    return MissingPackage(
        f"{engine} is not installed.", fix=f"Install it with `pip install {engine}`."
    )


def cannot_encode(engine: str, why: str) -> DataError:
    """Return the error for an engine that cannot encode for a tokenizer."""
    return DataError(
        f"{engine} cannot encode for this tokenizer: {why}.",
        fix="Use a different engine: the ids are the same.",
    )


def gigatoken_of_json(definition: Document) -> Encode:
    """Return gigatoken's encoder for a tokenizer.json without normaliser and added tokens.

    Raises: MissingPackage; DataError when gigatoken cannot read it.
    """
    text = json.dumps(definition)

    def load() -> BPETokenizer | SentencePieceTokenizer:
        from gigatoken.gigatoken_rs import load_hf_json

        return load_hf_json(text)

    return _Gigatoken(load)


def gigatoken_of_ranks(pieces: Sequence[bytes | None], scheme: str) -> Encode:
    """Return gigatoken's encoder for the pieces of a .tiktoken file, in the order of their ids.

    `scheme` is gigatoken's name for the pattern.

    Raises: MissingPackage; DataError when gigatoken cannot read them.
    """
    lines = b"".join(
        b2a_base64(piece, newline=False) + b" %d\n" % rank
        for rank, piece in enumerate(pieces)
        if piece is not None
    )

    def load() -> BPETokenizer:
        from gigatoken.gigatoken_rs import BPETokenizer

        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            file.write(lines)
            file.flush()
            return BPETokenizer.from_tiktoken(file.name, scheme)

    return _Gigatoken(load)


class _Gigatoken:
    """gigatoken on the calling thread, reloaded when its cache has grown."""

    def __init__(self, load: Callable[[], BPETokenizer | SentencePieceTokenizer]) -> None:
        self._load = load
        self._loaded: BPETokenizer | SentencePieceTokenizer | None = None
        try:
            self._reload()
        except ImportError as error:
            raise not_installed("gigatoken") from error
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a Rust panic is not an Exception
            reason = str(error).partition("\n")[0].rstrip(".")
            raise cannot_encode("gigatoken", reason) from error

    def _reload(self) -> None:
        self._loaded = None  # first, so that two are never in memory
        self._loaded = self._load()
        self._resident_bytes = psutil.Process().memory_info().rss
        self._bytes_to_check = GROWTH_CHECK_BYTES

    def __call__(self, text: str) -> Ids:
        data = utf8(text)
        self._bytes_to_check -= len(data)
        if self._bytes_to_check < 0:
            self._bytes_to_check = GROWTH_CHECK_BYTES
            if psutil.Process().memory_info().rss - self._resident_bytes > MAX_GROWTH_BYTES:
                self._reload()
        assert self._loaded is not None
        return self._loaded.encode(data)


def tiktoken_of(name: str, ranks: Mapping[bytes, int], pattern: str) -> Encode:
    """Return tiktoken's encoder for pieces with their ids.

    Raises: MissingPackage; ValueError when it cannot use the pattern.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise not_installed("tiktoken") from error

    # Without any special token, tiktoken searches for the empty string, and finds and skips it at
    # every character.
    unused = {"<|unused|>": max(ranks.values(), default=0) + 1}
    encoding = tiktoken.Encoding(
        name,
        pat_str=pattern,
        mergeable_ranks=dict(ranks),
        special_tokens=unused,
    )

    def encode(text: str) -> Ids:
        ids: Ids = encoding.encode_to_numpy(text, disallowed_special=())
        return ids

    return encode


def grouped(pattern: str) -> str:
    """Return a known pattern with all alternatives but those of white space in one group.

    The pattern matches the same, but tiktoken's engine passes a group without lookaround and
    possessive quantifiers to a faster engine as a whole, and encodes about 1.5 times as much text
    per second. A possessive `++` at the end of an alternative becomes `+`: nothing follows that
    could need backtracking.
    """
    found = _LAST_ALTERNATIVES.search(pattern)
    assert found is not None, "a known pattern"
    simple = f"{pattern[: found.start()]})".replace("++|", "+|").replace("++)", "+)")
    return f"(?:{simple}{pattern[found.start() :]}"


def with_fallback(encode: Encode, reference: Encode) -> Encode:
    """Return an encoder that uses `reference` for text that `encode` fails to split."""

    def encode_either(text: str) -> Ids:
        try:
            return encode(text)
        except UnicodeEncodeError:
            raise
        except ValueError:
            return reference(text)

    return encode_either


def around_added_tokens(encode: Encode, tokens: Mapping[str, int | None]) -> Encode:
    """Return an encoder that maps added tokens to their ids, and encodes the text between them.

    At each position the longest token wins. A token without an id is text, and so are tokens that
    overlap it, as in `tokenizers`.
    """
    if all(index is None for index in tokens.values()):
        return encode
    by_length = sorted(tokens, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, by_length)))

    def pieces(text: str) -> Iterator[Ids]:
        start = 0
        for match in pattern.finditer(text):
            index = tokens[match[0]]
            if index is not None:
                if start < match.start():
                    yield encode(text[start : match.start()])
                yield np.array([index], np.uint32)
                start = match.end()
        if start < len(text):
            yield encode(text[start:])

    def encode_around(text: str) -> Ids:
        if pattern.search(text) is None:
            return encode(text)
        text.encode()  # so that an error states the position in the whole text
        return np.concatenate([_NO_IDS, *pieces(text)])

    return encode_around


def after_nfc(encode: Encode) -> Encode:
    """Return an encoder that first applies NFC.

    The package `tokenizers` does it where Python finds that the text is not normalised: Python
    follows a newer version of Unicode, in which normalised text is normalised in older ones too.
    """
    from tokenizers import normalizers

    normalise = normalizers.NFC().normalize_str

    def encode_normalised(text: str) -> Ids:
        if unicodedata.is_normalized("NFC", text):
            return encode(text)
        text.encode()  # tokenizers would raise a TypeError
        return encode(normalise(text))

    return encode_normalised
