"""config.yaml protected against silent changes: a digest in its last line, and a copy that says
what was changed. No torch.

The digest is in the file itself, so that the two cannot be apart after a kill. The copy has the
same text, digest included.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from flatout.config.schema import RunConfig, difference, validate
from flatout.documents import parse_yaml
from flatout.errors import ConfigError, in_shell
from flatout.files import write_text
from flatout.recognised import read_regular

COPY = "config.copy.yaml"
OF_THE_MODEL = (
    "model.",
    "data.seq_len",
    "data.document_mask",
    "data.mix",
    "train.precision",
    "speedups",
)
"""Beginnings of the keys that decide what a trained model computes."""
_LOST_COPY = f"and {COPY}, which shows what it was, is missing or damaged."
_SEAL = re.compile(
    r"\A(?P<text>.*\n)# sha256 of the lines above: (?P<digest>[0-9a-f]{64})\n\Z", re.DOTALL
)


def write_sealed(path: Path, text: str) -> None:
    """Write the text with its digest, and the copy beside it first.

    `text` ends in a newline.
    """
    sealed = f"{text}# sha256 of the lines above: {_digest(text)}\n"
    write_text(path.with_name(COPY), sealed)
    write_text(path, sealed)


def require_unedited(path: Path, config: RunConfig, *, free: Iterable[str]) -> None:
    """Check that `config`, read from `path`, has the settings that were written there. Keys that
    begin with an entry of `free` may differ.

    A file with neither digest nor copy was written by an earlier version, and is accepted.
    Raises: ConfigError with the changed settings and the way to train with them on purpose.
    """
    edits = _edits(path, config)
    there = f"{path.parent} cannot be resumed: {path.name} was changed after the run had started"
    if edits is None:
        raise ConfigError(
            f"{there}, {_LOST_COPY}",
            fix="Restore the file. To train with it as it is, start another run: "
            f"--resume {in_shell(path.parent)} --run-dir DIR, with the settings you want.",
        )
    changed = {key: line for key, line in edits.items() if not key.startswith(tuple(free))}
    if changed:
        settings = " ".join(
            in_shell(f"{key}={_word(_value(config, key))}")
            for key in changed
            if _value(config, key) is not None
        )
        raise ConfigError(
            f"{there}: {'; '.join(changed.values())}.",
            fix=f"Restore it with `{_restoring(path)}`. "
            f"To change settings on purpose, restore it and start another run: --resume {in_shell(path.parent)} --run-dir DIR {settings}",
        )


def require_as_trained(path: Path, config: RunConfig) -> None:
    """Check that `config`, read from `path`, describes the model that was trained: else its weights
    give other text and other losses.

    Settings that matter in training alone may differ, and so may the whole file of an earlier
    version, as in `require_unedited`.
    Raises: ConfigError with the changed settings and the way to use the model with them on purpose.
    """
    edits = _edits(path, config)
    on_purpose = f"To use the model with the file as it is, delete {COPY} beside it and the last line of {path.name}, which is a digest."
    if edits is None:
        raise ConfigError(
            f"{path} was changed after the run had started, {_LOST_COPY}",
            fix=f"Restore the file. {on_purpose}",
        )
    changed = [line for key, line in edits.items() if key.startswith(OF_THE_MODEL)]
    if changed:
        raise ConfigError(
            f"{path} was changed after the run had started: {'; '.join(changed)}. The weights were trained with the settings before.",
            fix=f"Restore it with `{_restoring(path)}`. {on_purpose}",
        )


def _edits(path: Path, config: RunConfig) -> dict[str, str] | None:
    """Return each setting that is not what was written, with both values in words; None where
    nothing tells what was written.
    """
    sealed, copy = _read(path), _read(path.with_name(COPY))
    if _is_whole(sealed) or (_SEAL.match(sealed) is None and not copy):
        return {}
    if not _is_whole(copy):
        return None
    written = validate(parse_yaml(copy, name=str(path.with_name(COPY))), file=path.with_name(COPY))
    keys = dict.fromkeys(
        line.partition(": ")[0]
        for line in (*difference(written, config), *difference(config, written))
    )
    return {key: f"{key}: {_value(written, key)} -> {_value(config, key)}" for key in keys}


def _restoring(path: Path) -> str:
    """Return the command that restores the file from its copy."""
    return f"cp {in_shell(path.with_name(COPY))} {in_shell(path)}"


def _value(config: RunConfig, key: str) -> object:
    """Return the value at a dotted key; None where a model's own key is missing."""
    section, _, own = key.partition(".")
    return (
        config.model.own().get(own)
        if section == "model" and own != "kind" and own != "vocab_size"
        else config.value(key)
    )


def _is_whole(sealed: str) -> bool:
    found = _SEAL.match(sealed)
    return found is not None and _digest(found["text"]) == found["digest"]


def _read(path: Path) -> str:
    try:
        return read_regular(path, errors="replace") if path.exists() else ""
    except OSError as error:
        raise ConfigError(
            f"Cannot read {path}: {error.strerror}.",
            fix="Check its permissions, or restore it from a copy.",
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _word(value: object) -> str:
    """Return a value as a command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
