"""Lists the input files of a path, a glob or a URL, with what tells whether they have changed."""

from __future__ import annotations

import glob
import hashlib
import os
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import NoReturn

from flatout.config.registry import nearest
from flatout.data.sources.packed import is_packed, unpacked_name, unreadable
from flatout.errors import DataError
from flatout.storage.files import expanded
from flatout.storage.recognised import recognise
from flatout.storage.remote.reading import find_remote
from flatout.storage.remote.urls import is_url, is_web, name_in, protocol_of


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file to read, as it was when it was listed."""

    path: str
    """Its path or URL."""
    name: str
    """Its name inside the directory or pattern, or its URL."""
    size: int
    mtime_ns: int = 0
    """When a local file was modified."""
    mark: str = ""
    """The server's checksum or date of its content. For a local file, its fingerprint."""
    listed: str = ""
    """The URL that was listed to find it: its own, a directory's, or a pattern."""

    def identities(self) -> set[str]:
        """Return what is equal for equal files: its path, and its content unless it is empty."""
        if is_url(self.path):
            return {self.path}
        content = [f"{self.size} {self.mark}"] if self.size else []
        return {os.path.realpath(self.path), *content}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file: all of it, a range of bytes, or row groups."""

    path: str
    start: int
    """Its first byte, or row group."""
    end: int | None
    """The byte or row group after it. None for the end of the file."""
    num_bytes: int
    """Approximate bytes of text."""
    first_row: int = 0
    """Number of rows before the row groups."""


@dataclass(frozen=True)
class Wanted:
    """The files of a directory that are read."""

    suffixes: Set[str]
    """Suffixes of their names."""
    include: tuple[str, ...] = ()
    """Patterns of other names that are read too."""

    def takes(self, name: str) -> bool:
        """Return whether a file of this name is read."""
        return suffix_of(name) in self.suffixes or any(
            matches(name, pattern) for pattern in self.include
        )


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern such as `*.py` or `src/*.py` matches the end of a path.

    The pattern matches with or without the suffix of a compression.
    """
    return any(fnmatchcase(f"/{one}", f"*/{pattern}") for one in (name, unpacked_name(name)))


def suffix_of(name: str) -> str:
    """Return a file name's suffix in lower case, without that of its compression."""
    return Path(unpacked_name(name.lower())).suffix


def full_suffix_of(name: str) -> str:
    """Return a file name's suffix in lower case, with that of its compression: `.tar.gz`."""
    return suffix_of(name) + (Path(name_in(name).lower()).suffix if is_packed(name) else "")


def find_files(path: str, wanted: Wanted) -> tuple[list[InputFile], list[str]]:
    """Return the files at `path`, sorted, and the files of directories that are skipped by name.

    Directories are searched for wanted files, except hidden ones. Links are followed. A file is
    returned once.

    Raises: DataError when there are none, or a file or directory cannot be read.
    """
    if is_url(path) and protocol_of(path) == "file":
        path = urllib.parse.unquote(urllib.parse.urlsplit(path).path)
    if not is_url(path):
        target = expanded(path)
        try:
            return _find_local(path, target, wanted)
        except OSError as error:
            raise unreadable(str(error.filename or target), error) from error
    skipped: set[str] = set()

    def takes(name: str) -> bool:
        if _is_hidden(name) or wanted.takes(name):
            return not _is_hidden(name)
        skipped.add(f"{path.rstrip('/')}/{name.lstrip('/')}")
        return False

    found = find_remote(path, takes)
    files = [InputFile(one.url, one.url, one.size, mark=one.mark, listed=path) for one in found]
    return files, sorted(skipped)


def _find_local(path: str, target: Path, wanted: Wanted) -> tuple[list[InputFile], list[str]]:
    is_folder = target.is_dir()
    matching = [target]
    if not target.exists() and not target.is_symlink():
        if not glob.has_magic(path):
            raise missing(target)
        _require_listable(str(target))
        matching = [Path(name) for name in glob.glob(str(target), recursive=True)]
        matching.sort(key=lambda match: (len(match.parts), match))
    found: dict[str, tuple[Path, str]] = {}
    skipped: dict[str, tuple[str, str]] = {}
    for match in matching:
        if not match.is_dir():
            found.setdefault(_identity(match), (match, match.name))
    searched: set[str] = set()
    for match in filter(Path.is_dir, matching):
        for file in _walk(match, searched):
            name = file.relative_to(match).as_posix()
            if wanted.takes(name):
                found.setdefault(_identity(file), (file, name))
            else:
                skipped[_identity(file)] = name, str(file)
    if not found:
        raise _nothing(target, wanted, [name for name, _ in sorted(skipped.values())])
    files = sorted(found.values(), key=(lambda file: file[1]) if is_folder else None)
    if not is_folder:
        _require_text([file for file, _ in files], wanted)
    left = sorted(skipped[key] for key in skipped.keys() - found)
    return [_listed(file, name) for file, name in files], [file for _, file in left]


def _walk(folder: Path, searched: set[str]) -> Iterator[Path]:
    """Yield the files of a directory and its subdirectories, except hidden ones.

    A directory that several links lead to is searched once.
    """
    for place, inside, names in os.walk(folder, onerror=_raise, followlinks=True):
        real = os.path.realpath(place)
        inside[:] = sorted(name for name in inside if real not in searched and name[0] != ".")
        yield from (Path(place, name) for name in names if real not in searched and name[0] != ".")
        searched.add(real)


def _raise(error: OSError) -> NoReturn:
    raise error


def _identity(file: Path) -> str:
    """Return the real path of a file's directory, with its name."""
    return os.path.join(os.path.realpath(file.parent), file.name)


def _is_hidden(name: str) -> bool:
    return any(piece.startswith(".") for piece in name.split("/"))


def _listed(file: Path, name: str) -> InputFile:
    """Return a regular file.

    Raises: DataError for a broken link, a pipe or a device.
    """
    if file.is_file():
        stat = file.stat()
        return InputFile(str(file), name, stat.st_size, stat.st_mtime_ns)
    if not file.exists():
        raise DataError(
            f"{file} is a link to {os.readlink(file)}, which does not exist.",
            fix="Repair or remove the link, or name the other files by a pattern.",
        )
    raise DataError(f"{file} is not a regular file.", fix="Write the text to a file, and name it.")


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


def _require_text(files: list[Path], wanted: Wanted) -> None:
    """Reject files that are all recognised as something other than text.

    Next to text files, such a file is a bad row instead, which `--on-bad-row` handles.

    Raises: DataError naming the first and the command that reads it.
    """
    known = [None if suffix_of(file.name) in wanted.suffixes else recognise(file) for file in files]
    if known[0] is not None and None not in known:
        raise DataError(known[0].instead_of("text"), fix=known[0].fix)


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


def fingerprint(file: Path, size: int, limit: int) -> str:
    """Return a digest of a file, or of sixteen evenly spaced blocks if it exceeds `limit` bytes."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            if size <= limit:
                return hashlib.file_digest(stream, "sha256").hexdigest()
            length = limit // 16
            for index in range(16):
                stream.seek((size - length) * index // 15)
                digest.update(stream.read(length))
    except OSError as error:
        raise unreadable(str(file), error) from error
    return digest.hexdigest()


def first_changed(files: Iterable[InputFile]) -> str | None:
    """Return the first file that has changed since it was listed, or None.

    Web pages are not checked: the servers behind one name may describe a page differently.

    Raises: Unreachable when a store does not answer.
    """
    remote: dict[str, list[InputFile]] = {}
    for file in files:
        if file.listed:
            remote.setdefault(file.listed, []).append(file)
        elif (file.size, file.mtime_ns) != _state(file.path):
            return file.path
    for url, before in remote.items():
        if not is_web(url):
            entries = find_remote(url, lambda _: True)
            now = {(entry.url, entry.size, entry.mark) for entry in entries}
            changed = (file.path for file in before if (file.path, file.size, file.mark) not in now)
            if (first := next(changed, None)) is not None:
                return first
    return None


def _state(path: str) -> tuple[int, int]:
    """Return the size and the modification time of a local file. -1 when there is none."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def shared_file(some: Iterable[InputFile], others: Iterable[InputFile]) -> str | None:
    """Return the first of the `others` that is one of `some`, or a copy. None if there is none."""
    known = set(chain.from_iterable(file.identities() for file in some))
    return next((file.path for file in others if known & file.identities()), None)
