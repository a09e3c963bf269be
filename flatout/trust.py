"""Decide which run directories may import code: only those that the user trusts.

A run's config.yaml can name objects to import, `package.module:attribute`, and a run directory can
come from anywhere. A user trusts a run by naming the same references when training it, or with
--trust-code. Trust is stored outside the run directory, in `memory()`, one file per run directory:
its real path, the digest of its config.yaml, the references, and the digest of the code in the
directory. A copied, replaced or edited run directory is not trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

from flatout.cache import default_cache
from flatout.errors import UntrustedCode

REFERENCES = (
    ("model", "kind"),
    ("optim", "kind"),
    ("speedups",),
    ("log", "to"),
    ("log", "observers"),
)
"""Keys of a configuration whose values the registry looks up; `package.module:attribute` in one of
them imports the user's own code.
"""
BY_ARGUMENT = "pass trust_code=True (on the command line: --trust-code)"
"""How to trust code in Python; the command line replaces it with the full command."""
CONFIG = "config.yaml"
FORMAT_VERSION = 1
MOST_BYTES = 1 << 20
"""`remember` writes no file longer than this."""


def memory() -> Path:
    """Return the directory with one file per trusted run directory; only the user has access."""
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
        if not isinstance(words, list | tuple):
            continue
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

    A reference may be imported if it is `named` on this command line or in a recipe, or if the user
    trusts the run. `trust_code` makes the run trusted from now on.
    Raises: UntrustedCode naming the references and the files they would be imported from; nothing
            is imported.
    """
    if references <= named:
        return
    if trust_code:
        remember(run_folder, references)
        return
    entry = _read(run_folder)
    if entry is not None and _matches(entry, run_folder, references - named):
        return
    changed = (
        " It was trusted before, but its configuration or the code in it has changed since."
        if entry is not None
        else ""
    )
    unknown = sorted(references - named)
    stale = (
        " Delete the __pycache__ beside it, which may contain other code."
        if any(_has_compiled(reference) for reference in unknown)
        else ""
    )
    raise UntrustedCode(
        f"{run_folder / CONFIG} names code that opening the run would execute: "
        f"{', '.join(map(_with_file, unknown))}.{changed}",
        fix=f"Read that code.{stale} If you trust it, {BY_ARGUMENT}.",
    )


def remember(run_folder: Path, references: Iterable[str]) -> bool:
    """Trust a run directory in its present state; return whether that could be stored.

    If several processes do this at once, the last one wins. If the trust cannot be stored, the user
    is asked again next time.
    """
    from flatout.files import write_text  # the command line imports this module at its start

    if not (wanted := sorted(references)):
        return True
    try:
        path = _path(run_folder)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(path.parent.lstat(), stat.S_ISDIR):
            return False
        document = {
            "format_version": FORMAT_VERSION,
            "run": os.path.realpath(run_folder),
            "references": wanted,
            **_state_of(run_folder),
        }
        write_text(path, json.dumps(document, indent=1) + "\n", mode=0o600)
    except (OSError, RuntimeError):  # the home directory is unknown or cannot be written
        return False
    return True


def forget(run_folder: Path) -> None:
    """Remove what `remember` stored about a run directory, such as a temporary one."""
    with contextlib.suppress(OSError, RuntimeError):
        _path(run_folder).unlink(missing_ok=True)


def is_run_folder(folder: Path) -> bool:
    """Return whether `flatout train` created a directory, judging by its files."""
    return (folder / CONFIG).exists() and any(
        (folder / name).exists() for name in ("asked.yaml", "events.jsonl")
    )


def source_of(reference: str) -> Path | None:
    """Return the file that a reference would be imported from, or None; nothing is imported."""
    parts = reference.partition(":")[0].split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for entry in [*sys.path, ""]:
        base = Path(entry, *parts)
        files = [
            base / "__init__.py",
            *(base.with_name(base.name + suffix) for suffix in all_suffixes()),
        ]
        for file in files:
            if file.is_file():
                return file
    return None


def _with_file(reference: str) -> str:
    file = source_of(reference)
    return f"{reference!r} ({file if file else 'not found here'})"


def _has_compiled(reference: str) -> bool:
    file = source_of(reference)
    return file is not None and any((file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"))


def _matches(entry: dict[str, Any], run_folder: Path, references: Set[str]) -> bool:
    try:
        state = _state_of(run_folder)
    except OSError:
        return False
    state["run"] = os.path.realpath(run_folder)
    same = all(entry.get(key) == value for key, value in state.items())
    return same and references <= set(entry["references"])


def _state_of(run_folder: Path) -> dict[str, str]:
    """Return digests of the configuration and of the code in a run directory."""
    config = (run_folder / CONFIG).read_bytes()
    return {
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "code_sha256": _digest_of_code(run_folder),
    }


def _digest_of_code(run_folder: Path) -> str:
    """Return a digest of every file that Python could import, and of every link to a directory.

    __pycache__ is left out, as importing the code creates it.
    """
    suffixes = tuple(all_suffixes())
    digest = hashlib.sha256()
    for parent, folders, files in os.walk(run_folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in folders:
            path = Path(parent, name)
            if path.is_symlink():
                digest.update(
                    json.dumps([str(path.relative_to(run_folder)), os.readlink(path)]).encode()
                )
        for name in sorted(files):
            path = Path(parent, name)
            if name.endswith(suffixes) and path.is_file():
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(json.dumps([str(path.relative_to(run_folder)), content]).encode())
    return digest.hexdigest()


def _path(run_folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(run_folder))).hexdigest()[:32]
    return memory() / f"{name}.json"


def _read(run_folder: Path) -> dict[str, Any] | None:
    """Return the content of a run directory's trust file, or None when it has none.

    Also None when the file is damaged, or another user could have written it.
    """
    try:
        path = _path(run_folder)
        if not _is_private(path.parent.lstat(), stat.S_ISDIR):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8") as file:
            if not _is_private(os.fstat(descriptor), stat.S_ISREG):
                return None
            entry = json.loads(file.read(MOST_BYTES))
    except (OSError, RuntimeError, ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("format_version") != FORMAT_VERSION:
        return None
    references = entry.get("references")
    are_texts = isinstance(references, list) and all(isinstance(r, str) for r in references)
    return entry if are_texts else None


def _is_private(facts: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a file or directory is of the right kind and only this user may write it."""
    return is_kind(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022
