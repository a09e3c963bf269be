"""A copy of the user's working directory in which trials run, so that they overwrite nothing."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Self

from flatout.distributed.launch import own_environment
from flatout.errors import ConfigError

LARGE_BYTES = 256 << 20
"""A larger file is a link to the original, which trials replace instead of writing to it."""
MOST_BYTES, MOST_FILES = 4 << 30, 50_000
PROJECT_BYTES, PROJECT_FILES = 256 << 20, 5_000
"""Most of a git repository that is copied with a directory in it."""
LINKED = frozenset({".git", ".hg", ".venv", "venv", "node_modules"})
"""Directories that are links: trials only read them, if at all."""


class Scratch:
    """A copy of a directory at the same path below another root.

    What is beside its parent directories is linked there, so that `../data` exists. A context
    manager: at the end the copy is deleted.
    """

    def __init__(self, source: Path) -> None:
        self.source = source.resolve()
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
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def _copy(self) -> None:
        """Copy the directory, and link what is large or leads elsewhere.

        Raises: ConfigError when it has too much for copies.
        """
        num_bytes = num_files = 0
        for folder, folders, files in os.walk(self.source):
            at = self.path / Path(folder).relative_to(self.source)
            at.mkdir(parents=True, exist_ok=True)
            links = [one for one in folders if one in LINKED or os.path.islink(f"{folder}/{one}")]
            folders[:] = [name for name in folders if name not in links]
            for name in (*links, *files):
                original, num_files = Path(folder, name), num_files + 1
                size = original.lstat().st_size
                if size > LARGE_BYTES or original.is_symlink() or original.is_dir():
                    (at / name).symlink_to(original.resolve())
                elif original.is_file():  # no socket or pipe
                    shutil.copy2(original, at / name)
                    num_bytes += size
            if num_bytes > MOST_BYTES or num_files > MOST_FILES:
                raise ConfigError(
                    f"{self.source} has too many files to copy it for trials.",
                    fix="Start from a directory that contains only the script and its data.",
                )

    def reset(self) -> None:
        """Undo what a trial did to the copy, by another one."""
        shutil.rmtree(self.path)
        self._copy()

    def inside(self, word: str) -> str:
        """Return an argument with the path of the directory, or of a file in it, in the copy.

        The path starts the argument, or follows `=` or `:`. URLs stay as they are.
        """
        if "://" in word:
            return word
        path = rf"(^|[=:]){re.escape(str(self.source))}(?=[/:]|$)"
        return re.sub(path, lambda found: f"{found[1]}{self.path}", word)

    def of(self, folder: Path) -> Path:
        """Return the copy of a directory in the original."""
        return self.path / folder.resolve().relative_to(self.source)

    def environment(self) -> dict[str, str]:
        """Return the variables of a trial that lead into the copy, not to the original."""
        search = own_environment().get("PYTHONPATH", "")
        return {"PYTHONPATH": self.inside(search)} if search else {}

    def original(self, text: str) -> str:
        """Return a text with the paths of the user's files in place of those of the copy."""
        return text.replace(str(self.path), str(self.source))


def project_of(folder: Path) -> Path:
    """Return the top of the git repository of a directory: the script may import what is in it.

    A repository that is too large for copies does not count.
    """
    folder = folder.resolve()
    top = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), folder)
    num_bytes = num_files = 0
    for here, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name not in LINKED]
        num_files += len(files)
        sizes = (os.lstat(f"{here}/{name}").st_size for name in files)
        num_bytes += sum(size for size in sizes if size <= LARGE_BYTES)
        if num_bytes > PROJECT_BYTES or num_files > PROJECT_FILES:
            return folder
    return top
