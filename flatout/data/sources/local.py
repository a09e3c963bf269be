"""Finds the local files of a path (a file, a directory or a glob), and lists skipped files."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from flatout.config.registry import nearest
from flatout.data.sources.packed import is_packed, unpacked_name, unreadable
from flatout.errors import DataError
from flatout.storage.files import expanded
from flatout.storage.recognised import Recognised, recognise
from flatout.storage.remote.urls import name_in


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


Identity = tuple[str, str]
"""The real directory of a file, and its name."""
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
    """Return the files at a path or pattern. Directories are searched for wanted files.

    Links are followed, also to directories. A directory is searched once, even if several links
    lead to it. Each file that matches a pattern is returned once, under its shortest path.

    Raises: DataError when there are none, or a file or directory cannot be read.
    """
    target = expanded(path)
    found: dict[Identity, tuple[Path, str]] = {}
    skipped: dict[Identity, tuple[str, str]] = {}
    try:
        is_folder = target.is_dir()
        if target.exists() or target.is_symlink():
            matching = [target]
        elif glob.has_magic(path):
            _require_listable(str(target))
            matching = [Path(name) for name in glob.glob(str(target), recursive=True)]
            matching.sort(key=lambda match: (len(match.parts), match))
        else:
            raise missing(target)
        for match in matching:
            if not match.is_dir():
                found.setdefault(_identity(match), (_checked(match), match.name))
        searched: set[str] = set()
        for match in filter(Path.is_dir, matching):
            for file in _walk(match, searched):
                name = file.relative_to(match).as_posix()
                if wanted.takes(name):
                    found.setdefault(_identity(file), (_checked(file), name))
                else:
                    skipped[_identity(file)] = name, str(file)
        if not found:
            raise _nothing(target, wanted, [name for name, _ in sorted(skipped.values())])
        if not is_folder:
            _require_text([file for file, _ in found.values()], wanted)
    except OSError as error:
        raise unreadable(str(error.filename or target), error) from error
    left = skipped.keys() - found
    if is_folder:
        files = sorted(found.values(), key=lambda file: file[1])
        return files, [file for _, file in sorted(skipped[key] for key in left)]
    return sorted(found.values()), [skipped[key][1] for key in sorted(left)]


def _nothing(target: Path, wanted: Wanted, others: list[str]) -> DataError:
    """Return the error for a path where no file is wanted. `others` are names in a directory."""
    if not target.is_dir():
        return DataError(
            f"No file matches {str(target)!r}.",
            fix="Quote the pattern and check it with `ls`. `**` crosses directories. [v2] stands "
            "for one of its characters: write [[]v2] for a name with brackets.",
        )
    known = recognise(target)
    if known is not None:
        return DataError(known.instead_of("text"), fix=known.fix)
    endings = " ".join(sorted(wanted.suffixes))
    if not others:
        return DataError(
            f"{target} is an empty directory.",
            fix=f"Put files that end in {endings} there, or name a different directory.",
        )
    ((suffix, _),) = Counter(map(full_suffix_of, others)).most_common(1)
    return DataError(
        f"{target} contains no file that ends in {endings}.",
        fix=f"Name its files by a quoted pattern, for example {f'{target}/**/*{suffix}'!r}.",
    )


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
    """Return whether a part of a path starts with a dot. Directories skip such files."""
    return any(piece.startswith(".") for piece in name.split("/"))


def _checked(file: Path) -> Path:
    """Return a regular file.

    Raises: DataError for a broken link, a pipe or a device.
    """
    if file.is_file():
        return file
    if not file.exists():
        raise DataError(
            f"{file} is a link to {os.readlink(file)}, which does not exist.",
            fix="Repair or remove the link, or name the other files by a pattern.",
        )
    raise DataError(f"{file} is not a regular file.", fix="Write the text to a file, and name it.")


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


def _require_text(files: list[Path], wanted: Wanted) -> None:
    """Reject files that are all recognised as something other than text.

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


def _identity(file: Path) -> Identity:
    return os.path.realpath(file.parent), file.name


def _require_listable(pattern: str) -> None:
    """Check that every directory a pattern searches can be listed: glob treats others as empty.

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
