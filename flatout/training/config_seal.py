"""config.yaml protected against silent changes: a digest in its last line, and a copy that says what was changed. No torch.

The digest is in the file itself, so that the two cannot be apart after a kill. The copy has the same text, digest included.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from flatout.config import RunConfig, difference, validate
from flatout.data.disk import write_text
from flatout.documents import parse_yaml
from flatout.errors import ConfigError

COPY = "config.copy.yaml"
_SEAL = re.compile(r"\A(?P<text>.*\n)# sha256 of the lines above: (?P<digest>[0-9a-f]{64})\n\Z", re.DOTALL)


def write_sealed(path: Path, text: str) -> None:
    """Write the text with its digest, and the copy beside it first.

    `text` ends in a newline.
    """
    sealed = f"{text}# sha256 of the lines above: {_digest(text)}\n"
    write_text(path.with_name(COPY), sealed)
    write_text(path, sealed)


def require_unedited(path: Path, config: RunConfig, *, free: Iterable[str]) -> None:
    """Check that `config`, read from `path`, has the settings that were written there. Keys that begin with an entry of `free` may differ.

    A file with neither digest nor copy was written by an earlier version, and is accepted.
    Raises: ConfigError with the changed settings and the way to train with them on purpose.
    """
    sealed, copy = _read(path), _read(path.with_name(COPY))
    if _is_whole(sealed) or (_SEAL.match(sealed) is None and not copy):
        return
    there = f"{path.parent} cannot be resumed: {path.name} was changed after the run had started"
    if not _is_whole(copy):
        raise ConfigError(
            f"{there}, and {COPY}, which shows what it was, is missing or damaged.",
            fix=f"Restore the file. To train with it as it is, start another run: --resume {path.parent} --run DIR, with the settings you want.",
        )
    written = validate(parse_yaml(copy, name=str(path.with_name(COPY))), file=path.with_name(COPY))
    keys = dict.fromkeys(line.partition(": ")[0] for line in (*difference(written, config), *difference(config, written)))
    changed = [key for key in keys if not key.startswith(tuple(free))]
    if changed:
        settings = " ".join(f"{key}={_word(_value(config, key))}" for key in changed if _value(config, key) is not None)
        raise ConfigError(
            f"{there}: {'; '.join(f'{key}: {_value(written, key)} -> {_value(config, key)}' for key in changed)}.",
            fix=f"Restore it with `cp {path.with_name(COPY)} {path}`. "
            f"To change settings on purpose, restore it and start another run: --resume {path.parent} --run DIR {settings}",
        )


def _value(config: RunConfig, key: str) -> object:
    """Return the value at a dotted key; None where a model's own key is missing."""
    section, _, own = key.partition(".")
    return config.model.own().get(own) if section == "model" and own != "kind" and own != "vocab_size" else config.value(key)


def _is_whole(sealed: str) -> bool:
    found = _SEAL.match(sealed)
    return found is not None and _digest(found["text"]) == found["digest"]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _word(value: object) -> str:
    """Return a value as a command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
