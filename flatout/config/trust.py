"""Decide which run directories may import code: only those that the user trusts.

A run's config.yaml can name objects to import, `package.module:attribute`, and a run directory can
come from anywhere. They are imported when the user names the same references in the command or its
recipe, allows the code of this one command with --trust-code, or has named them when training this
run here. The last is stored outside the run directory, in `memory()`, one file per run directory,
with its references. A copied or moved run directory is not trusted, nor is another reference.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Set
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

from flatout.errors import UntrustedCode
from flatout.storage.cache import default_cache

REFERENCES = (
    ("model", "kind"),
    ("optim", "kind"),
    ("speedups",),
    ("log", "to"),
    ("log", "observers"),
)
"""Keys of a configuration whose values the registry looks up. `package.module:attribute` in one of
them imports the user's own code.
"""
BY_ARGUMENT = "pass trust_code=True (on the command line: --trust-code)"
"""How to trust code in Python. The command line replaces it with the full command."""
CONFIG = "config.yaml"
FORMAT_VERSION = 2
MOST_BYTES = 1 << 20
"""`remember` writes no file longer than this."""


def memory() -> Path:
    """Return the directory with one file per trusted run directory. Only the user has access."""
    return default_cache().expanduser() / "trusted"


def references_in(document: Mapping[str, Any]) -> frozenset[str]:
    """Return every `package.module:attribute` that a configuration, or part of one, names.

    Only the keys of REFERENCES count.
    """
    found: set[str] = set()
    for keys in REFERENCES:
        value: Any = document
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        words = value.split(",") if isinstance(value, str) else value
        if isinstance(words, list | tuple):
            found.update(str(word).strip().lstrip("+-") for word in words if ":" in str(word))
    return frozenset(found)


def require_trusted(
    run_folder: Path,
    references: Set[str],
    *,
    named: Set[str] = frozenset(),
    trust_code: bool = False,
) -> None:
    """Check that every reference of a run may be imported.

    A reference may be imported if it is `named` on this command line or in a recipe, if the user
    named it when training this run here, or with `trust_code`.
    Raises: UntrustedCode naming the references and the files they would be imported from. Nothing
            is imported.
    """
    if trust_code or references <= named or not (unknown := references - named - _read(run_folder)):
        return
    files = {reference: source_of(reference) for reference in sorted(unknown)}
    shown = (f"{one!r} ({file if file else 'not found here'})" for one, file in files.items())
    stale = (
        " Delete the __pycache__ beside it, which may contain other code."
        if any(
            f and any((f.parent / "__pycache__").glob(f"{f.stem}.*.pyc")) for f in files.values()
        )
        else ""
    )
    raise UntrustedCode(
        f"{run_folder / CONFIG} names code that opening the run would execute: {', '.join(shown)}.",
        fix=f"Read that code.{stale} If you trust it, {BY_ARGUMENT}.",
    )


def remember(run_folder: Path, references: Set[str]) -> bool:
    """Store that the user named these references for a run, and return whether that was possible.

    Others that are stored stay. If several processes do this at once, the last one wins. If it
    cannot be stored, the user is asked next time.
    """
    from flatout.storage.files import (
        write_text,  # the command line imports this module at its start
    )

    if not references:
        return True
    try:
        path = _path(run_folder)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(path.parent.lstat(), stat.S_ISDIR)
        document = {
            "format_version": FORMAT_VERSION,
            "run": os.path.realpath(run_folder),
            "references": sorted(references | _read(run_folder)),
        }
        write_text(path, json.dumps(document, indent=1) + "\n", mode=0o600)
    except (
        OSError,
        RuntimeError,
    ):  # there is no home directory, or others may write it
        return False
    return True


def forget(run_folder: Path) -> None:
    """Remove what `remember` stored about a run directory, such as a temporary one."""
    with contextlib.suppress(OSError, RuntimeError):
        _path(run_folder).unlink(missing_ok=True)


def is_run_folder(folder: Path) -> bool:
    """Return whether `flatout train` created a directory, judging by its files."""
    return (folder / CONFIG).exists() and (folder / "events.jsonl").exists()


def source_of(reference: str) -> Path | None:
    """Return the file that a reference would be imported from, or None. Nothing is imported."""
    parts = reference.partition(":")[0].split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for entry in [*sys.path, ""]:
        base = Path(entry, *parts)
        files = (base.with_name(base.name + suffix) for suffix in all_suffixes())
        if file := next(filter(Path.is_file, [base / "__init__.py", *files]), None):
            return file
    return None


def _path(run_folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(run_folder))).hexdigest()[:32]
    return memory() / f"{name}.json"


def _read(run_folder: Path) -> Set[str]:
    """Return the references that are stored for a run directory.

    None when its file is damaged, or another user could have written it.
    """
    try:
        path = _path(run_folder)
        _require_private(path.parent.lstat(), stat.S_ISDIR)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8") as file:
            _require_private(os.fstat(descriptor), stat.S_ISREG)
            entry = json.loads(file.read(MOST_BYTES))
        known = entry["format_version"] == FORMAT_VERSION and isinstance(entry["references"], list)
        return frozenset(map(str, entry["references"])) if known else frozenset()
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return frozenset()


def _require_private(facts: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Check that a file or directory is of the right kind and only this user may write it.

    Raises: PermissionError.
    """
    is_own = facts.st_uid == os.getuid() and not facts.st_mode & 0o022
    if not (is_kind(facts.st_mode) and is_own):
        raise PermissionError("others may write it")
