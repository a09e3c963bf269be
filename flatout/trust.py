"""Which run directories may import code of their own: those whose references this user named, here,
or allowed with --trust-code.

A run's config.yaml can name objects to import, `package.module:attribute`, and a run directory can
come from anywhere. What was allowed is remembered outside of it, in MEMORY, one file a run
directory: under its real path, with the digest of its config.yaml, the references, and the digest
of the code in the directory. A copy, a replacement or an edited file is a stranger again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Mapping, Set
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

from flatout.errors import UntrustedCode

MEMORY = Path("~/.cache/flatout/trusted")
"""Where it is remembered which run directories are trusted; readable and writable by the user
alone.
"""
REFERENCES = (("model", "kind"), ("optim", "kind"), ("speedups",))
"""Keys of a configuration whose value is looked up in the registry, where
`package.module:attribute` imports code of the user's own.
"""
BY_ARGUMENT = "pass trust_code=True (on the command line: --trust-code)"
"""How code is allowed, as Python says it; the command line puts the very command in its place."""
CONFIG = "config.yaml"
FORMAT_VERSION = 1
MOST_BYTES = 1 << 20
"""A longer file was not written by `remember`."""


def references_in(document: Mapping[str, Any]) -> frozenset[str]:
    """Return every `package.module:attribute` that a configuration, or one layer of it, names under
    a key of REFERENCES.
    """
    found: set[str] = set()
    for keys in REFERENCES:
        value: Any = document
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        words = (
            value.split(",")
            if isinstance(value, str)
            else value
            if isinstance(value, list | tuple)
            else ()
        )
        found.update(str(word).strip().lstrip("+-") for word in words if ":" in str(word))
    return frozenset(found)


def require_trusted(
    run_folder: Path,
    references: Set[str],
    *,
    named: Set[str] = frozenset(),
    trust_code: bool = False,
) -> None:
    """Do nothing when every reference may be imported: `named` on this command line or in a recipe,
    allowed now, or remembered.

    `trust_code` allows all of them, and is remembered.
    Raises: UntrustedCode naming the references, and the files they would be imported from, without
            importing anything.
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
        " It was trusted before; its configuration or the code in it has changed since."
        if entry is not None
        else ""
    )
    unknown = sorted(references - named)
    stale = (
        " Delete the __pycache__ beside it, which may hold other code."
        if any(_has_compiled(reference) for reference in unknown)
        else ""
    )
    raise UntrustedCode(
        f"{run_folder / CONFIG} names code of its own, which opening the run would execute: {', '.join(map(_described, unknown))}.{changed}",
        fix=f"Read that code.{stale} If you trust it, {BY_ARGUMENT}.",
    )


def remember(run_folder: Path, references: Iterable[str]) -> bool:
    """Remember that a run directory, as it is now, may import these references; return whether that
    could be written.

    Of several processes that do this at once, the last one's word stands. What cannot be written is
    asked for again another time.
    """
    if not (wanted := sorted(references)):
        return True
    try:
        place = _place(run_folder)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(place.parent.lstat(), stat.S_ISDIR):
            return False
        document = {
            "format_version": FORMAT_VERSION,
            "run": os.path.realpath(run_folder),
            "references": wanted,
            **_state_of(run_folder),
        }
        _write_private(place, json.dumps(document, indent=1) + "\n")
    except (OSError, RuntimeError):  # a home that cannot be written, or none at all
        return False
    return True


def is_run_folder(folder: Path) -> bool:
    """Say whether a folder was made by `flatout train`, as far as its files show."""
    return (folder / CONFIG).exists() and any(
        (folder / name).exists() for name in ("asked.yaml", "events.jsonl")
    )


def source_of(reference: str) -> Path | None:
    """Return the file that a reference would be imported from, or None when it cannot be found;
    nothing is imported.
    """
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


def _described(reference: str) -> str:
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
    same = all(entry.get(key) == value for key, value in state.items()) and entry.get(
        "run"
    ) == os.path.realpath(run_folder)
    return same and references <= set(entry["references"])


def _state_of(run_folder: Path) -> dict[str, str]:
    """Return the digests that a replaced configuration, or other code in the directory, changes."""
    config = (run_folder / CONFIG).read_bytes()
    return {
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "code_sha256": _digest_of_code(run_folder),
    }


def _digest_of_code(run_folder: Path) -> str:
    """Return one digest of every file under a folder that Python could import, and of every link to
    a folder.

    What Python compiled itself does not count: it appears when the code is imported.
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


def _place(run_folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(run_folder))).hexdigest()[:32]
    return MEMORY.expanduser() / f"{name}.json"


def _read(run_folder: Path) -> dict[str, Any] | None:
    """Return what is remembered of a run directory; None for nothing, and for a file that is
    damaged or that others could have written.
    """
    try:
        place = _place(run_folder)
        if not _is_private(place.parent.lstat(), stat.S_ISDIR):
            return None
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8") as file:
            if not _is_private(os.fstat(descriptor), stat.S_ISREG):
                return None
            entry = json.loads(file.read(MOST_BYTES))
    except (OSError, RuntimeError, ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("format_version") != FORMAT_VERSION:
        return None
    references = entry.get("references")
    return (
        entry
        if isinstance(references, list)
        and all(isinstance(reference, str) for reference in references)
        else None
    )


def _is_private(facts: os.stat_result, is_kind: Any) -> bool:
    """Say whether a file or folder is what it should be, this user's own, and writable by nobody
    else.
    """
    return is_kind(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _write_private(place: Path, text: str) -> None:
    """Write a file whole, for this user alone; when this returns, a power cut leaves it there."""
    temporary = place.with_name(f"{place.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(place.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
