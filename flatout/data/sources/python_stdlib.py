"""The running Python's standard library: about 12 MB of real code and prose on every machine."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from flatout.data.sources import Document, LeftOut, ReadTask, Row
from flatout.errors import DataError

PART_BYTES = 1 << 20
ENOUGH_BYTES = 12_000_000
"""The library's tests are added, in sorted order, only up to this size."""
_OUTSIDE = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}


def python_stdlib() -> list[ReadTask]:
    """Return the tasks of the standard library, one document per module, in sorted order.

    Raises: DataError when this Python has no library sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = choose(root)
    if not names:
        raise DataError(
            f"{root} contains no Python sources.",
            fix="Use a Python that comes with its standard library, or name a text file.",
        )
    tasks: list[ReadTask] = []
    group: list[str] = []
    group_bytes = 0
    for name in names:
        group.append(name)
        group_bytes += _size(root, name)
        if group_bytes >= PART_BYTES:
            tasks.append(_task(root, group, group_bytes))
            group, group_bytes = [], 0
    return [*tasks, _task(root, group, group_bytes)] if group else tasks


SOURCE = python_stdlib


def choose(root: Path) -> list[str]:
    """Return the files to read, relative to `root`, sorted. Tests only fill up to ENOUGH_BYTES."""
    names = []
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in _OUTSIDE]
        names += [
            Path(folder, name).relative_to(root).as_posix()
            for name in files
            if name.endswith(".py")
        ]
    chosen: list[str] = []
    total = 0
    for is_test, name in sorted((not _TESTS.isdisjoint(name.split("/")), name) for name in names):
        if is_test and total >= ENOUGH_BYTES:
            break
        chosen.append(name)
        total += _size(root, name)
    return sorted(chosen)


def _size(root: Path, name: str) -> int:
    return (root / name).stat().st_size


def _task(root: Path, names: list[str], num_bytes: int) -> ReadTask:
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return ReadTask(
        read_modules,
        (str(root), tuple(names)),
        fingerprint=digest.hexdigest(),
        num_bytes=num_bytes,
    )


def read_modules(root: str, names: tuple[str, ...]) -> Iterator[Row]:
    """Yield modules as documents, in their declared encoding. Undecodable modules are omitted."""
    for name in names:
        try:
            with tokenize.open(str(Path(root, name))) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            yield LeftOut("cannot be decoded", name)
        else:
            yield Document(text, name)
