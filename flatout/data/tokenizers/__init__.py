"""Tokenizers convert text to ids and back. Each file with a TOKENIZER defines one kind.

Whatever its origin, a tokenizer saves to one self-contained JSON file in the dataset's directory.
Loading it needs no network, no other file, and no package except the engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from flatout.config.documents import parser_says
from flatout.config.registry import TOKENIZERS, nearest
from flatout.config.words import name_for
from flatout.data.conversation.templates import CONFIG_FILE, config_in, tokens_in
from flatout.data.tokenizers.base import (
    FORMAT,
    FORMAT_VERSION,
    BoundedSample,
    Document,
    Sample,
    TokenizerFile,
    is_panic,
)
from flatout.data.tokenizers.base import Tokenizer as Tokenizer
from flatout.data.tokenizers.engine_choice import WORTHWHILE_CHARACTERS, choose_engine
from flatout.data.tokenizers.hub import is_repository, repository_file, tokenizer_file
from flatout.errors import DataError, FlatoutError
from flatout.progress import SILENT, Progress
from flatout.storage.files import expanded
from flatout.storage.recognised import recognise

RESTORE = (
    "Restore it from a copy: a dataset and the runs trained on it have the same tokenizer.json."
)
"""The fix for a tokenizer that was damaged or replaced."""
MAX_FILE_BYTES = 128 << 20
"""Tokenizer files are read whole. The largest in use have about 40 MB."""
_JSON_KIND = "huggingface"
"""The kind of a JSON file that flatout did not write."""
_FILES = "Give a file that flatout saved, a Hugging Face tokenizer.json, or a .tiktoken file."
_BESIDE = (CONFIG_FILE, "special_tokens_map.json", "generation_config.json", "config.json")
"""Files beside a tokenizer.json that may state its end-of-text token, the first that does first."""
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
) -> Tokenizer:
    """Return the tokenizer that `spec` names, with the fastest engine that gives its ids.

    `spec` is char, byte, train:N, a file, a directory, or a repository of the Hugging Face hub,
    `ORG/NAME` or `ORG/NAME@REVISION`. `train_on` returns the text for train:N, by default
    `sample`.

    Raises: DataError for any other name, a file that cannot be used, or an empty sample;
            MissingPackage.
    """
    kind = kind_named(spec)
    if kind is not None and kind.needs_corpus:
        tokenizer = kind.from_corpus(spec.partition(":")[2], sample, train_on or sample, progress)
    else:
        tokenizer = existing_tokenizer(spec, pattern, end_of_text, progress=progress)
    # twice as much, since the sample may include parts without text
    texts = sample(2 * WORTHWHILE_CHARACTERS) if tokenizer.engines else ()
    return choose_engine(tokenizer, texts, progress)


def _kinds_by(constant: str) -> dict[str, str]:
    """Return the kinds of tokenizers whose files assign `constant`, by its value."""
    values = {kind: TOKENIZERS.stated(kind, constant) for kind in TOKENIZERS.names()}
    return {value: kind for kind, value in values.items() if value is not None}


def kind_named(spec: str) -> type[Tokenizer] | None:
    """Return the kind whose SPEC matches `spec`, such as `train:4096`. None for a file."""
    name, colon, _ = spec.partition(":")
    for form, kind in _kinds_by("SPEC").items():
        if form.partition(":")[:2] == (name, colon):
            tokenizer: type[Tokenizer] = TOKENIZERS.get(kind)
            return tokenizer
    return None


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
    kind = kind_named(spec)
    if kind is not None and not kind.needs_corpus:
        return kind.from_corpus(spec.partition(":")[2], lambda _: (), lambda _: (), progress)
    path = tokenizer_path(spec)
    if path.is_file():
        return load_tokenizer(path, pattern=pattern, end_of_text=end_of_text)
    if is_repository(spec) and not path.parent.is_dir():
        path = tokenizer_file(spec, progress=progress)
        for name in _BESIDE:  # which are read beside it
            beside = repository_file(spec, name, progress=progress)
            if beside is not None and _stated_in(beside):
                break
        return load_tokenizer(path, end_of_text=end_of_text, name=spec)
    if "/" not in spec and not path.suffix:
        forms = sorted(_kinds_by("SPEC"))
        known = [_REPOSITORY, *(form.replace(":N", ":4096") for form in forms)]
        guess = name_for("tokenizer", spec, known) or nearest(spec, known)
        hint = f"Did you mean {guess!r}? " if guess else ""
        raise DataError(
            f"There is no tokenizer {spec!r}.",
            fix=f"{hint}Give {', '.join(forms)}, a tokenizer.json or .tiktoken file, or a Hugging "
            f"Face repository such as {_REPOSITORY}.",
        )
    here = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, here)
    raise DataError(
        f"There is no tokenizer file {path}.",
        fix=f"Did you mean {str(path.parent / near)!r}?" if near else "Check the path.",
    )


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


def load_tokenizer(
    path: Path,
    *,
    pattern: str | None = None,
    end_of_text: str | None = None,
    name: str | None = None,
    sha256: str | None = None,
) -> Tokenizer:
    """Return the tokenizer in a file: a saved one, a tokenizer.json, or a .tiktoken file.

    `pattern` splits text for an unpublished .tiktoken file. `end_of_text` is the name of that token
    in a tokenizer.json. `name` stands for the file in messages and defaults to its path. `sha256`
    is the digest that the file must have.

    Raises: DataError when the file cannot be read, is none of these, or has a different digest.
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
            f"{path} is damaged or was replaced: it is not the file that was written there.",
            fix=RESTORE,
        )
    name = name or str(path)
    kind = _kinds_by("SUFFIX").get(path.suffix)
    if kind is None:
        beside = [path.with_name(each) for each in _BESIDE]
        named = tokens_in(config_in(beside[1])) | tokens_in(config_in(beside[0]))
        stated = None if end_of_text else next(filter(None, map(_stated_in, beside)), None)
        return parse_tokenizer(data, name, end_of_text=end_of_text, named=named, stated=stated)
    file = TokenizerFile(name, data, pattern=pattern)
    tokenizer: Tokenizer = TOKENIZERS.get(kind).from_file(file)
    return tokenizer


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
    """Return the tokenizer in a JSON text. Messages call the text `name`.

    `end_of_text` is the name of that token in a tokenizer.json, else another file `stated` it.
    `named` are its special tokens by their usual names.

    Raises: DataError when it contains no tokenizer.
    """
    data = data.encode() if isinstance(data, str) else data
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name} is not a tokenizer: it is not JSON ({parser_says(error)}).", fix=_FILES
        ) from error
    if not isinstance(document, dict):
        raise DataError(f"{name} is not a tokenizer.", fix=_FILES)
    if document.get("format") == FORMAT:
        return _restored(document, name)
    file = TokenizerFile(name, data, document, None, end_of_text, named, stated)
    tokenizer: Tokenizer = TOKENIZERS.get(_JSON_KIND).from_file(file)
    return tokenizer


def _restored(document: Document, name: str) -> Tokenizer:
    version, kind = document.get("format_version"), document.get("kind")
    is_known = isinstance(version, int) and version <= FORMAT_VERSION
    if not is_known or kind not in TOKENIZERS.names():
        raise DataError(
            f"{name} contains a tokenizer of format_version {version}, kind {kind!r}.",
            fix="Install a newer flatout.",
        )
    try:
        tokenizer: Tokenizer = TOKENIZERS.get(kind).from_document(document)
    except BaseException as error:
        is_failure = isinstance(error, Exception) or is_panic(error)
        if isinstance(error, FlatoutError) or not is_failure:
            raise
        raise DataError(
            f"{name} is a damaged tokenizer file: {error!r}.", fix="Prepare the dataset again."
        ) from error
    return tokenizer
