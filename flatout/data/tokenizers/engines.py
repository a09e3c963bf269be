"""The packages that turn text into ids. Which one runs changes the time, never the ids: `fast_path`
sees to that.

An encoder takes text and returns its ids. It knows no special tokens, and raises UnicodeEncodeError
for half a surrogate pair.
"""

from __future__ import annotations

import base64
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from flatout.data.tokenizers.base import Encode, Ids
from flatout.errors import DataError, MissingPackage

if TYPE_CHECKING:
    from gigatoken.gigatoken_rs import BPETokenizer, SentencePieceTokenizer

LOOKED_AT_BYTES = 1_000_000
"""Text after which the growth of the process is looked at again."""
GROWN_BYTES = 32 << 20
"""gigatoken remembers every word it meets and forgets none: when the process has grown by so much,
it is loaded anew.
"""

NEVER_CHANGED_BY_NFC = (
    "\x00-\u02ff\u0400-\u0482\u048a-\u052f\u0531-\u0556\u05d0-\u05ea\u0620-\u064a"
    "\u2010-\u2027\u2030-\u205e\u2190-\u2328\u3001-\u3029\u3041-\u3096\u309b-\u30fe\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e"
)
"""Characters that NFC never changes or joins to what stands before them, as ranges of a regular
expression.
"""

_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
"""An escape, a class, or what cuts and nests alternatives."""
_FLAGS = re.compile(r"\(\?[a-zA-Z-]+\)")
"""A flag for all that follows, which a group would end."""
_HOLDING = r"(?<!\\)(?:[+*?]|\{[\d,]+\})\+"
_HARD = re.compile(rf"\(\?(?:[=!>]|<[=!])|{_HOLDING}|\\[1-9k]")
"""Looking around, holding on to what matched, and matching it again."""
_HOLDS_LAST = re.compile(rf"{_HOLDING}$")
_MAY_CHANGE = re.compile(f"[^{NEVER_CHANGED_BY_NFC}]+")
_NO_IDS = np.zeros(0, np.uint32)


def described(engine: str) -> str:
    """Return an engine's name with its version.

    Raises: MissingPackage when it is not installed.
    """
    try:
        return f"{engine} {metadata.version(engine)}"
    except metadata.PackageNotFoundError as error:
        raise missing(engine) from error


def missing(engine: str) -> MissingPackage:
    """Return the error for an engine that is not installed."""
    return MissingPackage(
        f"{engine} is not installed.", fix=f"Install it with `pip install {engine}`."
    )


def cannot(engine: str, why: str) -> DataError:
    """Return the error for an engine that cannot do a tokenizer's work."""
    return DataError(
        f"{engine} cannot encode for this tokenizer: {why}.",
        fix="Let another engine encode: the ids are the same.",
    )


def gigatoken_of_json(definition: Mapping[str, Any]) -> Encode:
    """Return gigatoken for a bare tokenizer.json: one without normaliser and added tokens.

    Raises: MissingPackage; DataError when gigatoken cannot read it.
    """
    text = json.dumps(definition)

    def load() -> BPETokenizer | SentencePieceTokenizer:
        from gigatoken.gigatoken_rs import load_hf_json

        return load_hf_json(text)

    return _Gigatoken(load)


GIGATOKEN_SCHEMES = ("gpt2", "gpt4", "o200k")
"""Ways to split text that gigatoken knows by name, among those that a .tiktoken file may ask for.
"""


def gigatoken_of_ranks(pieces: Sequence[bytes | None], scheme: str | None) -> Encode:
    """Return gigatoken for the pieces of a .tiktoken file, in order of their ids, split by the
    scheme of this name.

    Raises: MissingPackage; DataError when gigatoken cannot read them.
    """
    if scheme not in GIGATOKEN_SCHEMES:
        raise cannot("gigatoken", "it does not split text by this one's pattern")
    lines = b"".join(
        base64.b64encode(piece) + b" %d\n" % rank
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
    """gigatoken on the calling thread, loaded anew when it has grown."""

    def __init__(self, load: Callable[[], BPETokenizer | SentencePieceTokenizer]) -> None:
        self._load = load
        self._loaded: BPETokenizer | SentencePieceTokenizer | None = None
        try:
            self._renew()
        except ImportError as error:
            raise missing("gigatoken") from error
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            raise cannot("gigatoken", str(error).partition("\n")[0].rstrip(".")) from error

    def _renew(self) -> None:
        self._loaded = None  # first, so that there are never two
        self._loaded = self._load()
        self._resident_bytes = psutil.Process().memory_info().rss
        self._room_bytes = LOOKED_AT_BYTES

    def __call__(self, text: str) -> Ids:
        data = text.encode()
        self._room_bytes -= len(data)
        if self._room_bytes < 0:
            self._room_bytes = LOOKED_AT_BYTES
            if psutil.Process().memory_info().rss - self._resident_bytes > GROWN_BYTES:
                self._renew()
        assert self._loaded is not None
        return self._loaded.encode(data)


def tiktoken_of(name: str, ranks: Mapping[bytes, int], pattern: str) -> Encode:
    """Return tiktoken for some pieces with their ids.

    Raises: MissingPackage; ValueError when it cannot use the pattern.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise missing("tiktoken") from error

    # Without a special token tiktoken looks for the empty one, which it finds, and passes over, at
    # every character.
    unused = {"<|unused|>": max(ranks.values(), default=0) + 1}
    encoding = tiktoken.Encoding(
        name, pat_str=delegated(pattern), mergeable_ranks=dict(ranks), special_tokens=unused
    )

    def encode(text: str) -> Ids:
        ids: Ids = encoding.encode_to_numpy(text, disallowed_special=())
        return ids

    return encode


def delegated(pattern: str) -> str:
    """Return the pattern with neighbouring alternatives in one group wherever none looks around or
    holds on to what it matched.

    It matches the same: alternatives are tried in the same order. But tiktoken's engine hands such
    a group to a faster one, whole, where it would try alternatives one by one; half as much text
    more is encoded a second. A possessive `+` at the end of an alternative, where nothing follows
    that could want a character back, is dropped for that.
    """
    if _FLAGS.search(pattern):
        return pattern
    groups: list[str] = []
    for easy, run in groupby(
        map(_without_last_hold, _alternatives(pattern)),
        key=lambda alternative: not _HARD.search(alternative),
    ):
        held = list(run)
        groups += [f"(?:{'|'.join(held)})"] if easy and len(held) > 1 else held
    return "|".join(groups)


def _alternatives(pattern: str) -> Iterator[str]:
    """Cut a regular expression at the bars that are in no group, class or escape."""
    depth, start = 0, 0
    for found in _PARTS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if found[0] == "|" and not depth:
            yield pattern[start : found.start()]
            start = found.end()
    yield pattern[start:]


def _without_last_hold(alternative: str) -> str:
    return (
        alternative[:-1]
        if _HOLDS_LAST.search(alternative) and "$" not in alternative
        else alternative
    )


def falling_back(encode: Encode, reference: Encode) -> Encode:
    """Return `encode`, which gives text that it cannot split at all to `reference`."""

    def either(text: str) -> Ids:
        try:
            return encode(text)
        except UnicodeEncodeError:
            raise
        except ValueError:
            return reference(text)

    return either


def around_added_tokens(encode: Encode, tokens: Mapping[str, int | None]) -> Encode:
    """Return an encoder that gives added tokens in a text their own ids and `encode` what lies
    between them.

    The longest token wins at each place. One without an id is text, but what overlaps it is text
    too: so does `tokenizers`.
    """
    if not any(index is not None for index in tokens.values()):
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
        text.encode()  # an error names the place in the whole text
        return np.concatenate([_NO_IDS, *pieces(text)])

    return encode_around


def after_nfc(encode: Encode) -> Encode:
    """Return an encoder of NFC-normalised text, normalised by `tokenizers` itself: others follow
    newer versions of Unicode.

    It sees only the runs of characters that may change, each with the one before, to which the run
    may be joined.
    """
    from tokenizers import normalizers

    normalise = normalizers.NFC().normalize_str

    def pieces(text: str) -> Iterator[str]:
        done = 0
        for match in _MAY_CHANGE.finditer(text):
            start = max(match.start() - 1, 0)
            yield text[done:start]
            yield normalise(text[start : match.end()])
            done = match.end()
        yield text[done:]

    def encode_normalised(text: str) -> Ids:
        if _MAY_CHANGE.search(text) is None:
            return encode(text)
        text.encode()  # tokenizers would raise a TypeError
        return encode("".join(pieces(text)))

    return encode_normalised
