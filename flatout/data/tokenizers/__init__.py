"""Tokenizers convert text to ids and back. Each is a tokenizer.json.

A dataset and a run contain the file that the user gave, or one that was made from the text, and
beside it a tokenizer_config.json if other files stated its special tokens. Loading them needs no
network and no other file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from flatout.config.registry import nearest
from flatout.config.words import name_for
from flatout.data.conversation.templates import CONFIG_FILE, config_in, tokens_in
from flatout.data.sources.listing import missing
from flatout.data.tokenizers import make
from flatout.data.tokenizers.engine_choice import (
    WORTHWHILE_CHARACTERS,
    cached,
    choose_engine,
)
from flatout.data.tokenizers.engine_choice import (
    Announce as Announce,
)
from flatout.data.tokenizers.hub import is_repository, repository_file, tokenizer_file
from flatout.data.tokenizers.make import END_OF_TEXT as END_OF_TEXT
from flatout.data.tokenizers.make import BoundedSample, Sample
from flatout.data.tokenizers.tokenizer import NotEncodable as NotEncodable
from flatout.data.tokenizers.tokenizer import Tokenizer as Tokenizer
from flatout.data.tokenizers.tokenizer import (
    is_panic,
    library_tokenizer,
    usual_end_of_text,
    vocabulary_of,
)
from flatout.errors import DataError
from flatout.progress import SILENT, Progress
from flatout.storage.files import expanded, write_whole
from flatout.storage.json_io import JsonObject
from flatout.storage.recognised import recognise

RESTORE = (
    "Restore it from a copy: a dataset and the runs trained on it have the same tokenizer.json."
)
"""The fix for a tokenizer that was damaged or replaced."""
MAX_FILE_BYTES = 128 << 20
"""Tokenizer files are read whole. The largest in use have about 40 MB."""
FORMS = {
    "byte": "One id per UTF-8 byte.",
    "char": "One id per character of the corpus.",
    "ids:N": "N ids without text, for tokens whose tokenizer is unknown.",
    "train:N": "A byte-level BPE of N ids, trained on the corpus.",
}
"""What names a tokenizer that is no file, and what it is."""
FILES = {
    "tokenizer.json, ORG/NAME": "A file of the tokenizers library, its directory, or a repository "
    "of the Hugging Face hub.",
    "FILE.tiktoken": "Byte-level BPE: pieces in base64, with their ids.",
}
"""The files that contain one."""
_FILES = "Give a Hugging Face tokenizer.json or a .tiktoken file."
_BESIDE = (CONFIG_FILE, "special_tokens_map.json", "generation_config.json", "config.json")
"""Files beside a tokenizer.json that may state its end-of-text token, the first that does first."""
NAME_END = "name its end-of-text token with --end-of-text, or name a tokenizer.json file"
_REPOSITORY = "openai-community/gpt2"
"""An example, and what GPT-2's tokenizer is called on the hub."""


def make_tokenizer(
    spec: str,
    sample: Sample,
    *,
    train_on: BoundedSample | None = None,
    pattern: str | None = None,
    end_of_text: str | None = None,
    progress: Progress = SILENT,
    announce: Announce = lambda _: None,
) -> Tokenizer:
    """Return the tokenizer that `spec` names, with the fastest engine that gives its ids.

    `spec` is char, byte, train:N, a file, a directory, or a repository of the Hugging Face hub,
    `ORG/NAME` or `ORG/NAME@REVISION`. `train_on` returns the text for train:N, by default
    `sample`. `announce` is as in `choose_engine`.

    Raises: DataError for any other name, a file that cannot be used, or an empty sample;
            MissingPackage.
    """
    form = form_of(spec)
    if form == "char":
        tokenizer = make.of_characters(sample(None), progress)
    elif form == "train:N":
        tokenizer = make.trained(spec.partition(":")[2], train_on or sample, progress)
    else:
        tokenizer = existing_tokenizer(spec, pattern, end_of_text, progress=progress)
    # twice as much, since the sample may include parts without text
    texts = sample(2 * WORTHWHILE_CHARACTERS) if tokenizer.engine == "tokenizers" else ()
    return choose_engine(tokenizer, texts, progress, announce)


def form_of(spec: str) -> str | None:
    """Return which of FORMS `spec` has, such as train:N for train:4096. None for a file."""
    name, colon, _ = spec.partition(":")
    return next((form for form in FORMS if form.partition(":")[:2] == (name, colon)), None)


def needs_corpus(spec: str) -> bool:
    """Return whether the tokenizer that `spec` names is made from text."""
    return form_of(spec) in ("char", "train:N")


def require_used(spec: str, pattern: str | None, end_of_text: str | None) -> None:
    """Check that the tokenizer that `spec` names uses the other two options.

    Raises: DataError.
    """
    is_tiktoken = spec.endswith(".tiktoken")
    for option, value, is_used in (
        ("--pattern", pattern, is_tiktoken),
        ("--end-of-text", end_of_text, not is_tiktoken and form_of(spec) is None),
    ):
        if value and not is_used:
            raise DataError(
                f"{option} {value!r} has no effect on the tokenizer {spec}.",
                fix=f"Remove {option}.",
            )


def existing_tokenizer(
    spec: str,
    pattern: str | None = None,
    end_of_text: str | None = None,
    *,
    progress: Progress = SILENT,
) -> Tokenizer:
    """Return the tokenizer that `spec` names without a corpus: byte, a file, or a repository.

    Raises: DataError for any other name, or a file that cannot be used; MissingPackage.
    """
    form = form_of(spec)
    if form == "byte":
        return make.of_bytes()
    if form == "ids:N":
        return make.of_numbers(spec.partition(":")[2])
    path = tokenizer_path(spec)
    if path.is_file():
        return load_tokenizer(path, pattern=pattern, end_of_text=end_of_text)
    if is_repository(spec) and not path.parent.is_dir():
        path = tokenizer_file(spec, progress=progress)
        for name in () if end_of_text else _BESIDE:  # which are read beside it
            beside = repository_file(spec, name, otherwise=NAME_END, progress=progress)
            if beside is not None and _stated_in(beside):
                break
        return load_tokenizer(path, end_of_text=end_of_text, name=spec)
    if "/" not in spec and not path.suffix:
        known = [_REPOSITORY, *(each.replace(":N", ":4096") for each in FORMS)]
        guess = name_for("tokenizer", spec, known) or nearest(spec, known)
        hint = f"Did you mean {guess!r}? " if guess else ""
        raise DataError(
            f"There is no tokenizer {spec!r}.",
            fix=f"{hint}Give {', '.join(FORMS)}, a tokenizer.json or .tiktoken file, or a Hugging "
            f"Face repository such as {_REPOSITORY}.",
        )
    raise missing(path)


def tokenizer_path(spec: str) -> Path:
    """Return the path of the file that `spec` names, directly or by its directory.

    The file may not exist.

    Raises: DataError for a directory without a tokenizer.json.
    """
    path = expanded(spec)
    if not path.is_dir():
        return path
    if not (path / "tokenizer.json").is_file():
        near = sorted(entry.name for entry in path.glob("*.tiktoken"))
        raise DataError(
            f"The directory {path} has no tokenizer.json.",
            fix=f"Name the file: {str(path / near[0])!r}."
            if near
            else "Name a directory that has one, or give char, byte or train:N.",
        )
    return path / "tokenizer.json"


def read_tokenizer(path: Path) -> bytes:
    """Return the content of a tokenizer file.

    Raises: DataError when it cannot be read.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DataError(
                f"{path} is not a regular file.", fix="Name a tokenizer.json or a .tiktoken file."
            )
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(
                f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, too large for a tokenizer.",
                fix="Check that it is the right file.",
            )
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"Cannot read the tokenizer {path}: {error.strerror}.",
            fix="Check the path and its permissions.",
        ) from error


def stored_files(path: Path) -> list[Path]:
    """Return the files of a tokenizer in a dataset or a run: its tokenizer.json, and settings."""
    return [path, *filter(Path.is_file, [path.with_name(CONFIG_FILE)])]


def stored_digest(path: Path) -> str:
    """Return `Tokenizer.digest` of a tokenizer that `Tokenizer.save` wrote.

    Raises: DataError when it cannot be read.
    """
    return hashlib.sha256(b"".join(map(read_tokenizer, stored_files(path)))).hexdigest()


def load_tokenizer(
    path: Path,
    *,
    pattern: str | None = None,
    end_of_text: str | None = None,
    name: str | None = None,
    sha256: str | None = None,
) -> Tokenizer:
    """Return the tokenizer in a file: a tokenizer.json, or a .tiktoken file.

    `pattern` splits text for an unpublished .tiktoken file. `end_of_text` is the name of that token
    in a tokenizer.json. `name` stands for the file in messages and defaults to its path. `sha256`
    is the digest that the stored tokenizer must have.

    Raises: DataError when the file cannot be read, is none of these, or has a different digest.
    """
    known = recognise(path)
    if known is not None:
        raise DataError(
            known.instead_of("a tokenizer"),
            fix="Give a tokenizer.json, a .tiktoken file, or char, byte or train:N.",
        )
    if sha256 is not None and stored_digest(path) != sha256:
        raise DataError(
            f"{path} is damaged or was replaced: it is not the file that was written there.",
            fix=RESTORE,
        )
    data = read_tokenizer(path)
    if path.suffix == ".tiktoken":
        return _converted(data, name or str(path), pattern)
    config, special = (tokens_in(config_in(path.with_name(each))) for each in _BESIDE[:2])
    named, stated = special | config, None if end_of_text else stated_beside(path)
    return parse_tokenizer(
        data, name or str(path), end_of_text=end_of_text, named=named, stated=stated
    )


def _converted(data: bytes, name: str, pattern: str | None) -> Tokenizer:
    """Return the tokenizer of a .tiktoken file. It is converted once, because that takes a second.

    Raises: DataError as `make.from_tiktoken`.
    """
    kept = cached(
        "json",
        hashlib.sha256(data).hexdigest(),
        repr(pattern),
        import_module("flatout").__version__,
        version("tokenizers"),
    )
    with suppress(OSError, ValueError):  # it does not exist, or is cut off
        return Tokenizer(kept.read_bytes(), END_OF_TEXT)
    tokenizer = make.from_tiktoken(data, name, pattern)
    with suppress(OSError):
        write_whole(kept, tokenizer.content.decode())
    return tokenizer


def stated_beside(path: Path) -> tuple[str, str, str | int] | None:
    """Return what the files beside a tokenizer.json state as its end-of-text token, as below."""
    return next(filter(None, (_stated_in(path.with_name(each)) for each in _BESIDE)), None)


def _stated_in(path: Path) -> tuple[str, str, str | int] | None:
    """Return what a file states as the end-of-text token: the file, the key, a name or an id."""
    document = config_in(path)
    token, ids = tokens_in(document).get("eos_token"), document.get("eos_token_id")
    if token is not None:
        return str(path), "eos_token", token
    index = next(iter(ids), None) if isinstance(ids, list) else ids
    return (str(path), "eos_token_id", index) if type(index) is int else None


def parse_tokenizer(
    data: bytes | str,
    name: str,
    *,
    end_of_text: str | None = None,
    named: Mapping[str, str] | None = None,
    stated: tuple[str, str, str | int] | None = None,
) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. Messages call it `name`.

    Its end-of-text token is `end_of_text`, else the one that a file beside it `stated`, else the
    one in `named`, its special tokens by their usual names, else the first of the usual ones. An id
    that a file states counts if it is that of an added token.

    Raises: DataError when it contains no tokenizer, or has no such token.
    """
    content = data.encode() if isinstance(data, str) else data
    document = _parsed(content, name)
    vocabulary = vocabulary_of(document, name)
    added = {
        int(each["id"]): each["content"] for each in reversed(document.get("added_tokens") or [])
    }
    named = {key: each for key, each in (named or {}).items() if each in vocabulary}
    token = end_of_text or named.get("eos_token") or usual_end_of_text(vocabulary)
    if stated and not end_of_text:
        path, key, value = stated
        if isinstance(value, int):  # of a model's config, where it may be a default
            token = added.get(value, token)
        elif value not in vocabulary:
            raise DataError(
                f"{path} has the {key} {value!r}, but {name} has no such token.",
                fix="Correct it, or name the end-of-text token with --end-of-text NAME.",
            )
        else:
            token = value
    if token is None or token not in vocabulary:
        guess = nearest(token, vocabulary) if token else None
        raise DataError(
            f"{name} has no token {token!r}."
            if token
            else f"{name} has none of the usual end-of-text tokens.",
            fix=f"Did you mean {guess!r}?"
            if guess
            else "Name its end-of-text token with --end-of-text.",
        )
    return Tokenizer(content, token, named, definition=document)


def _parsed(content: bytes, name: str) -> JsonObject:
    """Return what a tokenizer.json contains.

    Raises: DataError when it is not one.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name} is not a tokenizer: it is not JSON ({error}).", fix=_FILES
        ) from error
    if not isinstance(document, dict):
        raise DataError(f"{name} is not a tokenizer.", fix=_FILES)
    if document.get("format") == "flatout-tokenizer":
        raise DataError(
            f"{name} is a tokenizer in a format of earlier versions of flatout.",
            fix="Prepare the dataset again, and train on it.",
        )
    try:
        library_tokenizer(content)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise DataError(f"{name} is not a tokenizer: {error}.", fix=_FILES) from error
    return document
