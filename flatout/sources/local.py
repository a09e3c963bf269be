"""What a path of this machine stands for: a file, a folder, a glob. Nothing that is meant is passed
over without a word.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from flatout.errors import DataError
from flatout.files import expanded
from flatout.recognised import Recognised, recognise
from flatout.registry import nearest
from flatout.sources.packed import is_packed, unpacked_name, unreadable
from flatout.transfer.urls import name_in


@dataclass(frozen=True)
class Wanted:
    """Which files of a folder are read."""

    suffixes: frozenset[str]
    """Endings of their names,"""
    include: tuple[str, ...] = ()
    """and patterns of names that are taken besides."""

    def takes(self, name: str) -> bool:
        """Return whether a file of this name is read."""
        return suffix_of(name) in self.suffixes or any(
            matches(name, pattern) for pattern in self.include
        )


class Search(NamedTuple):
    """What a path stands for."""

    files: list[tuple[Path, str]]
    """The files to read, each with its name in the folder or pattern."""
    passed_over: list[str]
    """Files of the folders that were searched which are not of the names that are wanted; hidden
    ones are not among them.
    """


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern such as `*.py` or `src/*.py` fits the end of a file's path, packed
    or not.
    """
    return any(fnmatchcase(f"/{one}", f"*/{pattern}") for one in (name, unpacked_name(name)))


def find_local(path: str, wanted: Wanted) -> Search:
    """Return the files that a path stands for; folders are searched for those that are wanted.

    Links are followed, to folders too; a folder is searched once, however many lead to it.

    Raises: DataError when there is none, or one that is meant, or a folder, is not handed out.
    """
    place = expanded(path)
    try:
        if place.is_file():
            _require_text([place], wanted)
            return Search([(place, place.name)], [])
        if place.is_dir():
            return _in_folder(place, wanted)
        if glob.has_magic(path):
            return _matching(str(place), wanted)
        if place.exists() or place.is_symlink():
            raise _no_file(place)
        raise missing(place)
    except OSError as error:
        raise unreadable(str(error.filename or place), error) from error


def missing(place: Path) -> DataError:
    """Return the error for a path where nothing is: the nearest name in that folder, or the folder
    that is missing.
    """
    if not place.parent.is_dir():
        return DataError(f"There is no folder {place.parent}.", fix="Check the path.")
    guess = nearest(place.name, [entry.name for entry in place.parent.iterdir()])
    return DataError(
        f"There is no file {place}.",
        fix=f"Did you mean {str(place.parent / guess)!r}?" if guess else "Check the path.",
    )


def suffix_of(name: str) -> str:
    """Return the ending of a file's name, in small letters and less the one that says how it is
    packed.
    """
    return Path(unpacked_name(name.lower())).suffix


def full_suffix_of(name: str) -> str:
    """Return the ending of a file's name in small letters, with the one that says how it is packed:
    `.tar.gz`.
    """
    return suffix_of(name) + (Path(name_in(name).lower()).suffix if is_packed(name) else "")


def is_hidden(name: str) -> bool:
    """Return whether a file of this name is passed over in a folder: its own begins with a dot, or
    that of a folder around it.
    """
    return any(piece.startswith(".") for piece in name.split("/"))


def _no_file(place: Path) -> DataError:
    if not place.exists():
        return DataError(
            f"{place} is a link to {os.readlink(place)}, where nothing is.",
            fix="Mend the link or remove it, or name the other files by a pattern.",
        )
    return DataError(
        f"{place} is not a regular file.", fix="Write the text to a file, and name that."
    )


def _in_folder(folder: Path, wanted: Wanted) -> Search:
    shown = sorted((file.relative_to(folder).as_posix(), file) for file in _walk(folder, set()))
    files = [(file, name) for name, file in shown if wanted.takes(name)]
    if files:
        taken = {name for _, name in files}
        return Search(
            [_checked(file, name) for file, name in files],
            [str(file) for name, file in shown if name not in taken],
        )
    known = recognise(folder)
    if known is not None:
        raise DataError(known.instead_of("text"), fix=known.fix)
    endings = " ".join(sorted(wanted.suffixes))
    common = Counter(full_suffix_of(name) for name, _ in shown).most_common(1)
    if common:
        pattern = f"{folder}/**/*{common[0][0]}"
        raise DataError(
            f"{folder} holds no file that ends in {endings}.",
            fix=f"Name its files by a quoted pattern, for example {pattern!r}.",
        )
    raise DataError(
        f"{folder} is an empty folder.",
        fix=f"Put files that end in {endings} there, or name another folder.",
    )


def _checked(file: Path, name: str) -> tuple[Path, str]:
    if not file.is_file():
        raise _no_file(file)
    return file, name


def _walk(folder: Path, searched: set[str]) -> Iterator[Path]:
    """Yield what is no folder in a folder and those inside it, less what is hidden; links to
    folders come last, so that they rename nothing.
    """
    inside, linked = [folder], list[Path]()
    while inside or linked:
        place = inside.pop() if inside else linked.pop(0)
        real = os.path.realpath(place)
        if real in searched:
            continue
        searched.add(real)
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if is_hidden(entry.name):
                    continue
                if not entry.is_dir():
                    yield place / entry.name
                else:
                    (linked if entry.is_symlink() else inside).append(place / entry.name)


def _matching(pattern: str, wanted: Wanted) -> Search:
    """Return the files that match, whatever they are called, and of folders that do what these are
    searched for; each once, by its shortest path.
    """
    _require_listed(pattern)
    matching = sorted(
        (Path(name) for name in glob.glob(pattern, recursive=True)),
        key=lambda match: (len(match.parts), match),
    )
    found: dict[tuple[str, str], tuple[Path, str]] = {}
    passed_over: dict[tuple[str, str], str] = {}
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
                passed_over[_identity(file)] = str(file)
    if not found:
        raise DataError(
            f"No file matches {pattern!r}.",
            fix="Quote the pattern and check it with `ls`; `**` crosses folders.",
        )
    _require_text([file for file, _ in found.values()], wanted)
    return Search(
        sorted(found.values()),
        sorted(file for key, file in passed_over.items() if key not in found),
    )


def _require_text(files: list[Path], wanted: Wanted) -> None:
    """Refuse files of which each one is known to be no text; some among others are bad documents,
    which have a rule of their own.

    Raises: DataError naming the first and the command that takes it.
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


def _require_listed(pattern: str) -> None:
    """Do nothing when every folder that is searched for a pattern can be: glob takes one that
    cannot for an empty one.

    Raises: OSError for the first that cannot.
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
