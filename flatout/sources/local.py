"""Finds the local files of a path (a file, a directory or a glob), and lists skipped files."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from flatout.errors import DataError
from flatout.files import expanded
from flatout.recognised import Recognised, recognise
from flatout.registry import nearest
from flatout.remote.urls import name_in
from flatout.sources.packed import is_packed, unpacked_name, unreadable


@dataclass(frozen=True)
class Wanted:
    """The files of a directory that are read."""

    suffixes: frozenset[str]
    """Suffixes of their names."""
    include: tuple[str, ...] = ()
    """Patterns of other names that are read too."""

    def takes(self, name: str) -> bool:
        """Return whether a file of this name is read."""
        return suffix_of(name) in self.suffixes or any(
            matches(name, pattern) for pattern in self.include
        )


Search = tuple[list[tuple[Path, str]], list[str]]
"""The files to read, each with its name inside the directory or pattern, and the paths of the other
files of the searched directories, except hidden ones.
"""


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern such as `*.py` or `src/*.py` matches the end of a path.

    The pattern matches with or without the suffix of a compression.
    """
    return any(fnmatchcase(f"/{one}", f"*/{pattern}") for one in (name, unpacked_name(name)))


def find_local(path: str, wanted: Wanted) -> Search:
    """Return the files at a path; directories are searched for wanted files.

    Links are followed, also to directories; a directory is searched once, even if several links
    lead to it.

    Raises: DataError when there are none, or a file or directory cannot be read.
    """
    target = expanded(path)
    try:
        if target.is_file():
            _require_text([target], wanted)
            return [(target, target.name)], []
        if target.is_dir():
            return _in_folder(target, wanted)
        if glob.has_magic(path):
            return _matching(str(target), wanted)
        if target.exists() or target.is_symlink():
            raise _no_file(target)
        raise missing(target)
    except OSError as error:
        raise unreadable(str(error.filename or target), error) from error


def missing(target: Path) -> DataError:
    """Return the error for a missing path, with the nearest name or the missing parent."""
    if not target.parent.is_dir():
        return DataError(f"There is no directory {target.parent}.", fix="Check the path.")
    guess = nearest(target.name, [entry.name for entry in target.parent.iterdir()])
    return DataError(
        f"There is no file {target}.",
        fix=f"Did you mean {str(target.parent / guess)!r}?" if guess else "Check the path.",
    )


def suffix_of(name: str) -> str:
    """Return a file name's suffix in lower case, without that of its compression."""
    return Path(unpacked_name(name.lower())).suffix


def full_suffix_of(name: str) -> str:
    """Return a file name's suffix in lower case, with that of its compression: `.tar.gz`."""
    return suffix_of(name) + (Path(name_in(name).lower()).suffix if is_packed(name) else "")


def is_hidden(name: str) -> bool:
    """Return whether a part of a path starts with a dot; directories skip such files."""
    return any(piece.startswith(".") for piece in name.split("/"))


def _no_file(target: Path) -> DataError:
    if not target.exists():
        return DataError(
            f"{target} is a link to {os.readlink(target)}, which does not exist.",
            fix="Repair or remove the link, or name the other files by a pattern.",
        )
    return DataError(
        f"{target} is not a regular file.", fix="Write the text to a file, and name it."
    )


def _in_folder(folder: Path, wanted: Wanted) -> Search:
    shown = sorted((file.relative_to(folder).as_posix(), file) for file in _walk(folder, set()))
    files = [(file, name) for name, file in shown if wanted.takes(name)]
    if files:
        taken = {name for _, name in files}
        skipped = [str(file) for name, file in shown if name not in taken]
        return [_checked(file, name) for file, name in files], skipped
    known = recognise(folder)
    if known is not None:
        raise DataError(known.instead_of("text"), fix=known.fix)
    endings = " ".join(sorted(wanted.suffixes))
    common = Counter(full_suffix_of(name) for name, _ in shown).most_common(1)
    if common:
        pattern = f"{folder}/**/*{common[0][0]}"
        raise DataError(
            f"{folder} contains no file that ends in {endings}.",
            fix=f"Name its files by a quoted pattern, for example {pattern!r}.",
        )
    raise DataError(
        f"{folder} is an empty directory.",
        fix=f"Put files that end in {endings} there, or name another directory.",
    )


def _checked(file: Path, name: str) -> tuple[Path, str]:
    if not file.is_file():
        raise _no_file(file)
    return file, name


def _walk(folder: Path, searched: set[str]) -> Iterator[Path]:
    """Yield the files of a directory and its subdirectories, except hidden ones.

    Links to directories come last, so that files found directly keep their names.
    """
    inside, linked = [folder], list[Path]()
    while inside or linked:
        target = inside.pop() if inside else linked.pop(0)
        real = os.path.realpath(target)
        if real in searched:
            continue
        searched.add(real)
        with os.scandir(target) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if is_hidden(entry.name):
                    continue
                if not entry.is_dir():
                    yield target / entry.name
                else:
                    (linked if entry.is_symlink() else inside).append(target / entry.name)


def _matching(pattern: str, wanted: Wanted) -> Search:
    """Return the files that match a pattern, and the wanted files of matching directories.

    Each file is returned once, under its shortest path.
    """
    _require_listable(pattern)
    matching = sorted(
        (Path(name) for name in glob.glob(pattern, recursive=True)),
        key=lambda match: (len(match.parts), match),
    )
    found: dict[tuple[str, str], tuple[Path, str]] = {}
    skipped: dict[tuple[str, str], str] = {}
    searched: set[str] = set()
    for match in matching:
        if not match.is_dir():
            found.setdefault(_identity(match), _checked(match, match.name))
    for match in filter(Path.is_dir, matching):
        for file in _walk(match, searched):
            name = file.relative_to(match).as_posix()
            if wanted.takes(name):
                found.setdefault(_identity(file), _checked(file, name))
            else:
                skipped[_identity(file)] = str(file)
    if not found:
        raise DataError(
            f"No file matches {pattern!r}.",
            fix="Quote the pattern and check it with `ls`; `**` crosses directories.",
        )
    _require_text([file for file, _ in found.values()], wanted)
    return sorted(found.values()), sorted(skipped[key] for key in skipped.keys() - found)


def _require_text(files: list[Path], wanted: Wanted) -> None:
    """Refuse files that are all recognised as something other than text.

    Next to text files, such a file is a bad row instead, which `--on-bad-row` handles.

    Raises: DataError naming the first and the command that reads it.
    """
    first: Recognised | None = None
    for file in files:
        known = None if suffix_of(file.name) in wanted.suffixes else recognise(file)
        if known is None:
            return
        first = first or known
    if first is not None:
        raise DataError(first.instead_of("text"), fix=first.fix)


def _identity(file: Path) -> tuple[str, str]:
    return os.path.realpath(file.parent), file.name


def _require_listable(pattern: str) -> None:
    """Check that every directory a pattern searches can be listed; glob treats others as empty.

    Raises: OSError for the first directory that cannot be listed.
    """
    pieces = Path(pattern).parts
    for number, piece in enumerate(pieces):
        if glob.has_magic(piece):
            for folder in glob.iglob(
                os.path.join(*pieces[:number]) if number else ".", recursive=True
            ):
                if os.path.isdir(folder):
                    os.scandir(folder).close()
                    os.stat(os.path.join(folder, "."))
