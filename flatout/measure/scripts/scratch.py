"""A copy of the user's working directory in which trials run, so that they overwrite nothing."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from flatout.errors import ConfigError

LARGE_BYTES = 256 << 20
"""A larger file is a link to the original, which trials replace instead of writing to it."""
MOST_BYTES, MOST_FILES = 4 << 30, 50_000
LINKED = frozenset({".git", ".hg", ".venv", "venv", "node_modules"})
"""Directories that are links: trials only read them, if at all."""
State = dict[str, tuple[int, int]]
"""Modification time and size of each file, by its path."""


class Scratch:
    """A copy of a directory at the same path below another root.

    What is beside its parent directories is linked there, so that `../data` exists. A context
    manager: at the end the copy is deleted.
    """

    def __init__(self, source: Path) -> None:
        self.source = source.resolve()
        self._folders: list[Path] = []
        """The directories of the copy, relative to it."""
        self.written: dict[str, None] = {}
        """Files that trials created or changed, relative to the directory."""
        self._root = Path(tempfile.mkdtemp(prefix="flatout-scratch-")).resolve()
        self.path = self._root / self.source.relative_to("/")
        """The copy."""

    def __enter__(self) -> Self:
        try:
            at = Path("/")
            for part in self.source.parts[1:]:
                own = self._root / at.relative_to("/")
                own.mkdir(exist_ok=True)
                for beside in os.scandir(at):
                    if beside.name != part:
                        (own / beside.name).symlink_to(beside.path)
                at /= part
            self._copy()
            self._state = self._look()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def _copy(self) -> None:
        """Copy the directory.

        Raises: ConfigError when it has too much for copies.
        """
        num_bytes = num_files = 0
        for folder, folders, files in os.walk(self.source):
            at = Path(folder).relative_to(self.source)
            (self.path / at).mkdir(parents=True, exist_ok=True)
            self._folders.append(at)
            links = [
                name for name in folders if name in LINKED or (Path(folder) / name).is_symlink()
            ]
            folders[:] = [name for name in folders if name not in links]
            for name in (*links, *files):
                num_bytes, num_files = num_bytes + self._place(at / name), num_files + 1
            if num_bytes > MOST_BYTES or num_files > MOST_FILES:
                raise ConfigError(
                    f"{self.source} has too many files to copy it for trials.",
                    fix="Start from a directory that contains only the script and its data.",
                )

    def _place(self, name: Path | str) -> int:
        """Copy a file, or link what is large or leads elsewhere, and return the copied bytes."""
        original, own = self.source / name, self.path / name
        size = original.lstat().st_size
        if size > LARGE_BYTES or original.is_symlink() or original.is_dir():
            own.symlink_to(original.resolve())
        elif original.is_file():  # no socket or pipe
            shutil.copy2(original, own)
            return size
        return 0

    def _look(self) -> State:
        found = {}
        for folder, folders, files in os.walk(self.path):
            names = (*files, *(name for name in folders if os.path.islink(f"{folder}/{name}")))
            for name in names:
                entry = os.lstat(path := os.path.join(folder, name))
                found[os.path.relpath(path, self.path)] = entry.st_mtime_ns, entry.st_size
        return found

    def reset(self) -> None:
        """Undo what a trial did to the copy."""
        now = self._look()
        changed = {name for name, _ in now.items() ^ self._state.items()}
        for name in sorted(changed):
            if "__pycache__" not in name:
                self.written[name] = None
            own = self.path / name
            own.unlink(missing_ok=True)
            if name in self._state:
                own.parent.mkdir(parents=True, exist_ok=True)
                self._place(name)
        for folder, _, _ in os.walk(self.path, topdown=False):
            if Path(folder).relative_to(self.path) not in self._folders:
                with suppress(OSError):  # it is not empty
                    os.rmdir(folder)
        for at in self._folders:
            (self.path / at).mkdir(parents=True, exist_ok=True)
        self._state = self._look() if changed else self._state

    def inside(self, word: str) -> str:
        """Return an argument with the path of the directory, or of a file in it, in the copy.

        The path starts the argument, or follows `=` or `:`. URLs stay as they are.
        """
        if "://" in word:
            return word
        path = rf"(^|[=:]){re.escape(str(self.source))}(?=/|$)"
        return re.sub(path, lambda found: f"{found[1]}{self.path}", word)

    def original(self, text: str) -> str:
        """Return a text with the paths of the user's files in place of those of the copy."""
        return text.replace(str(self.path), str(self.source))
