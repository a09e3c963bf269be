"""Detects edits of config.yaml: its first line is a digest, and a copy shows what was changed.

The digest is in the file itself, so that a kill cannot separate the two, and at its beginning, so
that a file that was cut short has it too. The copy has the same text, digest included. The file
asked.yaml has a digest and no copy. No torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from flatout.config.documents import parse_yaml
from flatout.config.schema import RunConfig, difference, override, validate
from flatout.errors import ConfigError, in_shell
from flatout.storage.files import write_text
from flatout.storage.recognised import read_regular

COPY = "config.copy.yaml"
OF_THE_MODEL = (
    "model.",
    "data.seq_len",
    "data.document_mask",
    "data.mix",
    "train.precision",
    "speedups",
)
"""Prefixes of the keys that decide what a trained model computes."""
_LOST_COPY = f"and {COPY}, which shows the original settings, is missing or damaged."
_SEAL = re.compile(
    r"\A# sha256 of the lines below: (?P<digest>[0-9a-f]{64})\n(?P<text>.*)\Z", re.DOTALL
)


def write_sealed(text: str, *paths: Path) -> None:
    """Write `text` to files, with its digest in the line before it. A copy comes first."""
    for path in paths:
        write_text(path, f"# sha256 of the lines below: {_digest(text)}\n{text}")


def require_whole(path: Path) -> None:
    """Check that a file has the text that `write_sealed` wrote, or no digest.

    Raises: ConfigError.
    """
    sealed = _read(path)
    if sealed.startswith("#") and not _is_whole(sealed):
        raise ConfigError(
            f"{path} was changed after the run had started, or is damaged: it does not match the "
            "SHA-256 in its first line.",
            fix="Restore it from a copy, or start a new run: "
            f"--resume {in_shell(path.parent)} --run-dir DIR starts it from this one.",
        )


def require_unedited(path: Path, config: RunConfig, *, free: Iterable[str]) -> None:
    """Check that `config`, read from `path`, has the settings that `write_sealed` wrote.

    Keys that start with an entry of `free` may differ. A file with neither digest nor copy is
    accepted: the user wants it that way.
    Raises: ConfigError naming the changed settings, and how to train with them on purpose.
    """
    edits = _edits(path, config)
    refused = f"{path.parent} cannot be resumed: {path.name} was changed after the run had started"
    if edits is None:
        raise ConfigError(
            f"{refused}, {_LOST_COPY}",
            fix="Restore the file. To train with it as it is, start a new run: "
            f"--resume {in_shell(path.parent)} --run-dir DIR, with the settings you want.",
        )
    changed = {key: line for key, line in edits.items() if not key.startswith(tuple(free))}
    if changed:
        settings = " ".join(
            override(key, _value(config, key)) for key in changed if _value(config, key) is not None
        )
        raise ConfigError(
            f"{refused}: {'; '.join(changed.values())}.",
            fix=f"Restore it with `{_restore_command(path)}`. "
            "To change settings on purpose, restore it and start a new run: --resume "
            f"{in_shell(path.parent)} --run-dir DIR {settings}",
        )


def require_as_trained(path: Path, config: RunConfig) -> None:
    """Check that `config`, read from `path`, describes the model that was trained.

    With other settings its weights produce other text and losses. Settings that only matter in
    training may differ. A file with neither digest nor copy is accepted.
    Raises: ConfigError naming the changed settings, and how to use the model with them on purpose.
    """
    edits = _edits(path, config)
    on_purpose = (
        f"To use the model with the file as it is, delete {COPY} beside it "
        f"and the first line of {path.name}, which is a digest."
    )
    if edits is None:
        raise ConfigError(
            f"{path} was changed after the run had started, {_LOST_COPY}",
            fix=f"Restore the file. {on_purpose}",
        )
    changed = [line for key, line in edits.items() if key.startswith(OF_THE_MODEL)]
    if changed:
        raise ConfigError(
            f"{path} was changed after the run had started: {'; '.join(changed)}. The weights were "
            "trained with the earlier settings.",
            fix=f"Restore it with `{_restore_command(path)}`. {on_purpose}",
        )


def _edits(path: Path, config: RunConfig) -> dict[str, str] | None:
    """Return a line with both values for each key that was edited, by key.

    None when the original settings are unknown.
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
    lines = {key: f"{key}: {_value(written, key)} -> {_value(config, key)}" for key in keys}
    strange = config.model.own().keys() - written.model.own().keys()  # also without a value
    return lines | {key: f"{key} is new" for key in (f"model.{own}" for own in strange)}


def _restore_command(path: Path) -> str:
    """Return the command that restores the file from its copy."""
    return f"cp {in_shell(path.with_name(COPY))} {in_shell(path)}"


def _value(config: RunConfig, key: str) -> object:
    """Return the value at a dotted key. None when the model has no such key."""
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
