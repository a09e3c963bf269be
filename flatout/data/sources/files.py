"""Files, local or remote, compressed or not.

Text is one document per file. JSONL, CSV and Parquet are one document per row.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

from flatout.data.conversation.rendering import Renderer
from flatout.data.sources import FIRST_NAMED, LeftOut, ReadTask
from flatout.data.sources.fields import Fields
from flatout.data.sources.file_reading import (
    ROW_SUFFIXES,
    holds_rows,
    is_jsonl,
    is_parquet,
    read_pieces,
)
from flatout.data.sources.input_file import InputFile, Piece, fingerprint
from flatout.data.sources.local import Wanted, find_local, full_suffix_of, is_hidden
from flatout.data.sources.packed import is_packed, require_opener
from flatout.data.sources.parquet import PARQUET_SUFFIXES, cut_parquet, require_parquet
from flatout.errors import DataError
from flatout.storage.remote.reading import find_remote
from flatout.storage.remote.urls import is_url, is_web, protocol_of

PARTS, MIN_PART_BYTES = 64, 1 << 20
PART_BYTES = 4 << 20
"""Most text of a task. Less of a corpus that has fewer than PARTS of these, so that many cores
share its work. A file of rows is split, a text file is not."""
REMOTE_PART_BYTES = 32 << 20
"""The same for remote files: each task reads up to a block too much, and Parquet's footer again."""
TEXT_SUFFIXES = {".txt", ".text", ".md", ".markdown", ".rst", ".tex"}
_SEARCHED_SUFFIXES = frozenset(TEXT_SUFFIXES | ROW_SUFFIXES | PARQUET_SUFFIXES)
"""Suffixes searched for in a directory. A file named directly or by a pattern may have any."""
FINGERPRINT_BYTES = 256 << 20
COMPARED_BYTES = 1 << 20
"""Bytes read, at most, to tell whether a file is a copy of another."""
PARALLEL_FILES = 16
"""Parquet files whose row groups are listed at the same time: this mostly waits for a server."""


def files(
    path: str,
    text_field: str = "text",
    mask_field: str | None = None,
    include: Sequence[str] = (),
    chat: Renderer | None = None,
) -> list[ReadTask]:
    """Return the tasks of a file, a directory (searched recursively), a glob, or a URL of these.

    Files are sorted. `include` lists patterns of other names to read. `chat` writes rows of chat
    data as text.

    Raises: DataError with the nearest name when nothing is there; MissingPackage.
    """
    fields = Fields(text_field, mask_field, chat)
    found, skipped = find_files(path, tuple(include))
    for file in found:
        require_opener(file.path)
        if is_parquet(file.name):
            require_parquet(file.path)
    if mask_field is not None and not any(holds_rows(file.name) for file in found):
        raise DataError(
            f"{path} has no rows, so it has no field {mask_field!r}.",
            fix="Remove --mask-field, or name JSONL, CSV or Parquet.",
        )
    if chat is not None and not any(holds_rows(file.name) for file in found):
        raise DataError(
            f"{path} has no rows, so it contains no chat data.",
            fix="Remove --chat, or name JSONL or Parquet.",
        )
    per_file = max(4096, FINGERPRINT_BYTES // len(found))
    part_bytes = min(max(sum(file.size for file in found) // PARTS, MIN_PART_BYTES), PART_BYTES)
    with ThreadPoolExecutor(PARALLEL_FILES) as threads:
        try:
            cut = threads.map(lambda file: _cut(file, fields, part_bytes), found)
            marked = threads.map(lambda file: _with_fingerprint(file, per_file), found)
            first, *others = _tasks(list(zip(marked, cut, strict=True)), fields, part_bytes)
        except BaseException:  # an interrupt does not wait for the files that are left
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return [replace(first, skipped=_count_skipped(skipped)), *others]


SOURCE = files


def _count_skipped(skipped: Sequence[str]) -> tuple[LeftOut, ...]:
    """Return the skipped files, counted by suffix. The first few of each are named."""
    by_suffix: dict[str, list[str]] = {}
    for name in skipped:
        by_suffix.setdefault(full_suffix_of(name), []).append(name)
    return tuple(
        LeftOut(
            f"{suffix} file" if suffix else "file without an ending",
            name,
            count=len(names) - FIRST_NAMED + 1 if index == FIRST_NAMED - 1 else 1,
        )
        for suffix, names in sorted(by_suffix.items(), key=lambda item: (-len(item[1]), item[0]))
        for index, name in enumerate(names[:FIRST_NAMED])
    )


def _cut(file: InputFile, fields: Fields, part_bytes: int) -> list[Piece]:
    limit = REMOTE_PART_BYTES if is_url(file.path) else part_bytes
    if is_parquet(file.name):
        return list(cut_parquet(file.path, file.size, fields, limit))
    whole, scale = max(file.size, 1), 3 if is_packed(file.name) else 1
    step = whole
    if is_jsonl(file.name) and not is_packed(file.name):
        step = limit
    ends = ((start, min(start + step, file.size)) for start in range(0, whole, step))
    return [Piece(file.path, start, end, (end - start) * scale) for start, end in ends]


def _tasks(
    cut: list[tuple[InputFile, list[Piece]]], fields: Fields, part_bytes: int
) -> Iterator[ReadTask]:
    """Yield tasks of about `part_bytes`. A file's fingerprint is that of its first piece's task."""
    pieces: list[Piece] = []
    started: list[InputFile] = []
    num_bytes = 0

    def task() -> ReadTask:
        marks = "\n".join(f"{file.name} {file.size} {file.mark}" for file in started)
        paths = tuple(piece.path for piece in pieces)
        return ReadTask(
            read_pieces, (tuple(pieces), fields), marks, num_bytes, tuple(started), paths
        )

    for file, of_file in cut:
        for index, piece in enumerate(of_file):
            if pieces and num_bytes + piece.num_bytes > part_bytes:
                yield task()
                pieces, started, num_bytes = [], [], 0
            pieces.append(piece)
            num_bytes += piece.num_bytes
            if index == 0:
                started.append(file)
    yield task()


def find_files(path: str, include: tuple[str, ...] = ()) -> tuple[list[InputFile], list[str]]:
    """Return the files at `path`, sorted, and the files of directories that are skipped by name.

    Raises: DataError when there are none.
    """
    wanted = Wanted(_SEARCHED_SUFFIXES, include)
    if is_url(path) and protocol_of(path) == "file":
        path = urllib.parse.unquote(urllib.parse.urlsplit(path).path)
    if is_url(path):
        skipped: dict[str, None] = {}

        def takes(name: str) -> bool:
            if is_hidden(name):
                return False
            if not wanted.takes(name):
                skipped[f"{path.rstrip('/')}/{name.lstrip('/')}"] = None
                return False
            return True

        found = [
            InputFile(entry.url, entry.url, entry.size, entry.mark, listed=path)
            for entry in find_remote(path, takes)
        ]
        return found, sorted(skipped)
    local, others = find_local(path, wanted)
    stats = [(str(file), name, file.stat()) for file, name in local]
    return [InputFile(file, name, stat.st_size, stat=stat) for file, name, stat in stats], others


def _with_fingerprint(file: InputFile, limit: int) -> InputFile:
    """Return the file, if it is local with a digest of its content."""
    if file.stat is None:
        return file
    return replace(file, mark=fingerprint(Path(file.path), file.size, limit), limit=limit)


def first_changed(tasks: Iterable[ReadTask]) -> str | None:
    """Return the first file that has changed since the tasks were made, or None.

    Web pages are not checked: the servers behind one name may describe a page differently.

    Raises: Unreachable when a store does not answer.
    """
    remote: dict[str, list[InputFile]] = {}
    for file in chain.from_iterable(task.files for task in tasks):
        if file.stat is None:
            remote.setdefault(file.listed, []).append(file)
        elif file.has_changed():
            return file.path
    for url, before in remote.items():
        if not is_web(url):
            entries = find_remote(url, lambda _: True)
            now = {(entry.url, entry.size, entry.mark) for entry in entries}
            changed = (file.path for file in before if (file.path, file.size, file.mark) not in now)
            if (first := next(changed, None)) is not None:
                return first
    return None


def has_rows(task: ReadTask) -> bool:
    """Return whether a task may contain rows. For files, their names decide."""
    return not task.paths or any(map(holds_rows, task.paths))


def shared_file(some: Iterable[ReadTask], others: Iterable[ReadTask]) -> str | None:
    """Return the first file of `others` that `some` also read, or None.

    Remote files are compared by URL, local files by size and, where sizes are equal, by a digest of
    sixteen blocks. Empty files are ignored.
    """
    first, second = ([path for task in tasks for path in task.paths] for tasks in (some, others))
    sizes = _sizes(first) & _sizes(second)
    known = {_identity_of(path, sizes) for path in first} - {None}
    return next((path for path in second if _identity_of(path, sizes) in known), None)


def _sizes(paths: list[str]) -> set[int]:
    return {Path(path).stat().st_size for path in paths if not is_url(path)} - {0}


def _identity_of(path: str, sizes: set[int]) -> str | None:
    """Return a key that identifies a file. None for a local file whose size is not in `sizes`."""
    if is_url(path):
        return path
    size = Path(path).stat().st_size
    return f"{size} {fingerprint(Path(path), size, COMPARED_BYTES)}" if size in sizes else None
