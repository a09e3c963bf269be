"""Text to tokens and back. Five kinds: characters, bytes, a BPE trained on the corpus, a
tokenizer.json (of a file, a folder or a
repository of the Hugging Face hub), a .tiktoken file.

Whatever it came from, a tokenizer saves to one self-contained JSON file, which lies in the data
set's folder and in nothing else's care: loading it needs no network, no other file and no package
but the one that encodes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flatout.cache import CACHE
from flatout.data.tokenizers.base import FORMAT, FORMAT_VERSION, StoredTokenizer
from flatout.data.tokenizers.bpe import SCHEMES, RankTokenizer, read_tiktoken, train_bpe
from flatout.data.tokenizers.check import require_usable, strings_in, try_out_within_limits
from flatout.data.tokenizers.engine_choice import WORTHWHILE_CHARACTERS, choose_engine
from flatout.data.tokenizers.hub import is_repository, tokenizer_file
from flatout.data.tokenizers.huggingface import HuggingFaceTokenizer, is_proven, vocabulary_of
from flatout.data.tokenizers.plain import ByteTokenizer, CharTokenizer, characters_of
from flatout.documents import parser_says
from flatout.errors import DataError
from flatout.files import expanded
from flatout.progress import SILENT, Progress
from flatout.recognised import recognise
from flatout.registry import nearest

TRAINING_BYTES = 8_000_000
"""Text a BPE is trained on: a few seconds' work, and more hardly changes a vocabulary of this size.
"""

RESTORE = "Restore it from a copy: a dataset and the runs that were trained on it have the same tokenizer.json."
"""What to do about a tokenizer that is not the one that was kept."""
LARGEST_BYTES = 128 << 20
"""A tokenizer's file is read whole; the largest in use have about 40 MB."""

Sample = Callable[[int | None], Iterable[str]]
"""Gives about so much of the corpus, spread evenly over it; None asks for all of it."""

_KINDS: dict[str, Callable[[dict[str, Any]], StoredTokenizer]] = {
    "char": CharTokenizer.from_document,
    "byte": ByteTokenizer.from_document,
    "bpe": RankTokenizer.from_document,
    "huggingface": HuggingFaceTokenizer.from_document,
}


class Tokenizer(Protocol):
    """What turns text into ids below `vocab_size`. Text never yields `eot_id` or another special
    id.
    """

    name: str
    vocab_size: int
    eot_id: int
    """End-of-text: put after every document, by the packer, never by the tokenizer."""
    engine: str
    """The package that encodes; it changes no id. Empty where none is needed."""

    def encode_pieces(self, text: str) -> Iterator[np.ndarray[Any, np.dtype[np.uint32]]]:
        """Yield the ids of one text piece by piece, so that a long one takes less memory."""

    def encode_stream(
        self, chunks: Iterable[str]
    ) -> Iterator[np.ndarray[Any, np.dtype[np.uint32]]]:
        """Yield the ids of one text that comes in chunks, in bounded memory; how it is chunked
        changes no id.
        """

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; bytes that are not UTF-8 become U+FFFD."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of some ids, which may end inside a character."""

    def save(self, path: Path) -> None:
        """Write the tokenizer, whole, to one JSON file."""

    def digest(self) -> str:
        """Return the SHA-256 of the file that `save` writes."""


def make_tokenizer(
    spec: str,
    sample: Sample,
    *,
    train_on: Callable[[int], Iterable[str]] | None = None,
    pattern: str | None = None,
    end_of_text: str | None = None,
    cache: Path | None = CACHE,
    progress: Progress = SILENT,
) -> Tokenizer:
    """Return the tokenizer that `spec` names, with the fastest engine that gives its ids on text of
    the corpus.

    `spec` is char, byte, train:N, a file, a folder, or a repository of the Hugging Face hub,
    `ORG/NAME` or `ORG/NAME@REVISION`. `train_on` gives what train:N learns from, about so much of
    the corpus; None takes it of `sample`. `cache` is where verdicts on engines are kept; None keeps
    none.

    Raises: DataError for a name that is none of these, a file that cannot be used, or an empty
            sample; MissingPackage.
    """
    if spec == "char":
        with progress.task("Collecting characters", unit="MB") as task:
            return CharTokenizer(characters_of(sample(None), task))
    trained = is_made_of_text(spec)
    made = (
        _trained(spec, train_on or sample, progress)
        if trained
        else existing_tokenizer(spec, pattern, end_of_text, progress=progress)
    )
    kept = None if trained else cache  # what is trained here is not met again
    some = (
        sample(2 * WORTHWHILE_CHARACTERS) if made.engines else ()
    )  # parts without text leave some of it ungiven
    return choose_engine(made, some, cache=kept, progress=progress)


def is_made_of_text(spec: str) -> bool:
    """Return whether `spec` names a tokenizer that is made from the corpus: char or train:N."""
    return spec == "char" or spec.startswith("train:")


def _trained(
    spec: str, train_on: Callable[[int], Iterable[str]], progress: Progress
) -> StoredTokenizer:
    size = _vocabulary_size(spec)
    tokenizer = train_bpe(train_on(TRAINING_BYTES), size, progress=progress)
    if tokenizer.vocab_size < size:
        progress.say(
            f"The text gives {tokenizer.vocab_size:,} tokens, not {size:,}: no more pairs repeat in it."
        )
    return tokenizer


def existing_tokenizer(
    spec: str,
    pattern: str | None = None,
    end_of_text: str | None = None,
    *,
    progress: Progress = SILENT,
) -> StoredTokenizer:
    """Return the tokenizer that `spec` names, which needs no text to be made: byte, a file, a
    folder, or a repository of the hub.

    Raises: DataError for a name that is none of these, or a file that cannot be used;
            MissingPackage.
    """
    if spec == "byte":
        return ByteTokenizer()
    path = tokenizer_place(spec)
    if path.is_file():
        return load_tokenizer(path, pattern=pattern, end_of_text=end_of_text)
    if is_repository(spec) and not path.parent.is_dir():
        return load_tokenizer(
            tokenizer_file(spec, progress=progress), end_of_text=end_of_text, name=spec
        )
    if "/" not in spec and not path.suffix:
        guess = nearest(spec, ["char", "byte", "train:4096"])
        hint = f"Did you mean {guess!r}? " if guess else ""
        raise DataError(
            f"There is no tokenizer {spec!r}.",
            fix=f"{hint}Give char, byte, train:N, a tokenizer.json or .tiktoken file, or a Hugging Face repository such as openai-community/gpt2.",
        )
    near = (
        nearest(path.name, [entry.name for entry in path.parent.iterdir()])
        if path.parent.is_dir()
        else None
    )
    raise DataError(
        f"There is no tokenizer file {path}.",
        fix=f"Did you mean {str(path.parent / near)!r}?" if near else "Check the path.",
    )


def tokenizer_place(spec: str) -> Path:
    """Return the file that `spec` names, itself or by its folder; it may not be there.

    Raises: DataError for a folder without a tokenizer.json.
    """
    path = expanded(spec)
    if not path.is_dir():
        return path
    if not (path / "tokenizer.json").is_file():
        near = sorted(entry.name for entry in path.glob("*.tiktoken"))
        fix = (
            f"Name the file: {str(path / near[0])!r}."
            if near
            else "Name a folder that has one, or give char, byte or train:N."
        )
        raise DataError(f"The folder {path} has no tokenizer.json.", fix=fix)
    return path / "tokenizer.json"


def read_tokenizer(path: Path) -> bytes:
    """Return what is in a tokenizer's file.

    Raises: DataError when it cannot be read.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DataError(
                f"{path} is not a regular file.", fix="Name a tokenizer.json or a .tiktoken file."
            )
        if path.stat().st_size > LARGEST_BYTES:
            raise DataError(
                f"{path} is larger than {LARGEST_BYTES >> 20} MiB, too large for a tokenizer.",
                fix="Check that it is the right file.",
            )
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"Cannot read the tokenizer {path}: {error.strerror}.",
            fix="Check the path and its permissions.",
        ) from error


def _vocabulary_size(spec: str) -> int:
    digits = spec.removeprefix("train:")
    if not digits.isdecimal() or not 258 <= int(digits) <= 1_000_000:
        raise DataError(
            f"{spec!r} does not name a vocabulary size.",
            fix="Give a number from 258 (the bytes, end-of-text, one merge) to 1,000,000, for example train:4096.",
        )
    return int(digits)


def load_tokenizer(
    path: Path,
    *,
    pattern: str | None = None,
    end_of_text: str | None = None,
    name: str | None = None,
    sha256: str | None = None,
) -> StoredTokenizer:
    """Return the tokenizer in a file: one that `save` wrote, a Hugging Face tokenizer.json, or a
    .tiktoken file.

    `pattern` splits text for a .tiktoken file that is not a known one; `end_of_text` names that
    token of a tokenizer.json; `name` is what messages call the file, its path unless stated;
    `sha256` is the digest that it must have.

    Raises: DataError when the file cannot be read, is none of these, or has another digest.
    """
    known = recognise(path)
    if known is not None:
        raise DataError(
            known.instead_of("a tokenizer"),
            fix="Give a tokenizer.json, a .tiktoken file, or char, byte or train:N.",
        )
    data = read_tokenizer(path)
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(
            f"{path} is damaged, or was replaced: it is not the file that was written there.",
            fix=RESTORE,
        )
    if path.suffix == ".tiktoken":
        made = read_tiktoken(data, name or str(path), pattern=pattern)
        if not made.proven:
            require_usable(made.text.encode(), name or str(path), cache=CACHE)
        return made
    return parse_tokenizer(data, name or str(path), end_of_text=end_of_text)


def parse_tokenizer(
    data: bytes | str, name: str, *, end_of_text: str | None = None
) -> StoredTokenizer:
    """Return the tokenizer in the text of a JSON file called `name`.

    Raises: DataError when it holds none.
    """
    fix = "Give a file that flatout saved, a Hugging Face tokenizer.json, or a .tiktoken file."
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name} is not a tokenizer: it is not JSON ({parser_says(error)}).", fix=fix
        ) from error
    if not isinstance(document, dict):
        raise DataError(f"{name} is not a tokenizer.", fix=fix)
    if not _is_proven(document):
        require_usable(data if isinstance(data, bytes) else data.encode(), name, cache=CACHE)
    if document.get("format") != FORMAT:
        return HuggingFaceTokenizer.from_file(document, name, end_of_text=end_of_text)
    return _restored(document, name)


def _is_proven(document: dict[str, Any]) -> bool:
    """Return whether nothing in a tokenizer's file can make loading it or encoding a text endless."""
    if document.get("format") != FORMAT:
        return is_proven(document)
    if document.get("kind") == "huggingface":
        return is_proven(document.get("tokenizer"))
    return document.get("kind") != "bpe" or document.get("pattern") in SCHEMES


def try_out(name: str, cpu_s: float) -> int:
    """Load the tokenizer on standard input and encode texts within limits; return the exit code.
    `tokenizers_check` runs this in a process.
    """
    document = json.load(sys.stdin.buffer)

    def load() -> StoredTokenizer:
        if document.get("format") == FORMAT:
            return _restored(document, name)
        vocabulary_of(document, name)
        return HuggingFaceTokenizer(name, document, 0)

    definition = document.get("tokenizer", document)
    parts = (
        []
        if document.get("kind") == "bpe"
        else [definition.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
    )
    return try_out_within_limits(load, name, strings_in(parts), cpu_s)


def _restored(document: dict[str, Any], name: str) -> StoredTokenizer:
    version, kind = document.get("format_version"), document.get("kind")
    if not isinstance(version, int) or version > FORMAT_VERSION or kind not in _KINDS:
        raise DataError(
            f"{name} holds a tokenizer of format_version {version}, kind {kind!r}.",
            fix="Install a newer flatout.",
        )
    try:
        return _KINDS[kind](document)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"{name} is a damaged tokenizer file: {error!r}.", fix="Prepare the data set again."
        ) from error
