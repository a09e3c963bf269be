"""Files: text (a file is a document) and JSONL (a row is a document), packed or not; a file, a folder, a glob."""

from __future__ import annotations

import glob
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from flatout.errors import DataError
from flatout.registry import nearest
from flatout.sources import BadRow, Document, Part, Row, line_number
from flatout.sources.packed import is_packed, open_bytes, require_opener, unpacked_name, unreadable

PART_BYTES = 4 << 20
"""About how much text one part holds; a text file is never cut, a JSONL file is."""
TEXT_SUFFIXES = {".txt", ".text", ".md", ".markdown", ".rst", ".tex"}
ROW_SUFFIXES = {".jsonl", ".ndjson"}
"""What a folder is searched for. A file named outright, or by a glob, may have any name; these alone are read by rows."""
FINGERPRINT_BYTES = 256 << 20


@dataclass(frozen=True)
class Span:
    """Bytes of one file that a part reads: the whole of a text file, the rows of JSONL that begin in [start, end)."""

    path: str
    start: int
    end: int


def files(path: str, text_field: str = "text") -> list[Part]:
    """Return the parts of a file, a folder (searched recursively, in sorted order) or a glob.

    Raises: DataError when nothing is there, with the nearest name that is; MissingPackage when unpacking takes one.
    """
    found = find_files(path)
    per_file = max(4096, FINGERPRINT_BYTES // len(found))
    parts: list[Part] = []
    held: list[tuple[Span, str]] = []
    held_bytes = 0
    for file, name in found:
        require_opener(str(file))
        size = file.stat().st_size
        mark = f"{name} {size} {fingerprint(file, size, per_file)}"
        step = PART_BYTES if is_rows(file.name) and not is_packed(file.name) else max(size, 1)
        for start in range(0, max(size, 1), step):
            span = Span(str(file), start, min(start + step, size))
            if held and held_bytes + span.end - span.start > PART_BYTES:
                parts.append(_part(held, text_field))
                held, held_bytes = [], 0
            held.append((span, mark))
            held_bytes += span.end - span.start
    return [*parts, _part(held, text_field)]


SOURCE = files


def _part(held: list[tuple[Span, str]], text_field: str) -> Part:
    marks = "\n".join(mark for span, mark in held if span.start == 0)
    spans = tuple(span for span, _ in held)
    size = sum((span.end - span.start) * (3 if is_packed(span.path) else 1) for span in spans)
    return Part(read_spans, (spans, text_field), fingerprint=marks, num_bytes=size)


def find_files(path: str) -> list[tuple[Path, str]]:
    """Return every file that `path` stands for, sorted, each with its name inside the folder or pattern.

    Raises: DataError when there is none.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [(place, place.name)]
    if place.is_dir():
        return _in_folder(place)
    if glob.has_magic(path):
        found = sorted(Path(name) for name in glob.glob(str(place), recursive=True))
        files = [(file, file.name) for file in found if file.is_file()]
        if not files:
            raise DataError(f"No file matches {path!r}.", fix="Quote the pattern and check it with `ls`; `**` crosses folders.")
        return files
    if place.exists():
        raise DataError(f"{place} is not a regular file.", fix="Write the text to a file, and name that.")
    raise missing(place)


def _in_folder(folder: Path) -> list[tuple[Path, str]]:
    found = [(file.relative_to(folder).as_posix(), file) for file in folder.rglob("*") if file.is_file()]
    shown = [(name, file) for name, file in sorted(found) if not any(piece.startswith(".") for piece in name.split("/"))]
    files = [(file, name) for name, file in shown if _suffix(name) in TEXT_SUFFIXES | ROW_SUFFIXES]
    if files:
        return files
    wanted = " ".join(sorted(TEXT_SUFFIXES | ROW_SUFFIXES))
    common = Counter(_suffix(name) for name, _ in shown).most_common(1)
    if common:
        pattern = f"{folder}/**/*{common[0][0]}"
        raise DataError(f"{folder} holds no file that ends in {wanted}.", fix=f"Name its files by a quoted pattern, for example {pattern!r}.")
    raise DataError(f"{folder} is an empty folder.", fix=f"Put files that end in {wanted} there, or name another folder.")


def missing(place: Path) -> DataError:
    """Return the error for a path where nothing is: the nearest name in that folder, or the folder that is missing."""
    if not place.parent.is_dir():
        return DataError(f"There is no folder {place.parent}.", fix="Check the path.")
    guess = nearest(place.name, [entry.name for entry in place.parent.iterdir()])
    return DataError(f"There is no file {place}.", fix=f"Did you mean {str(place.parent / guess)!r}?" if guess else "Check the path.")


def _suffix(name: str) -> str:
    return Path(unpacked_name(name.lower())).suffix


def is_rows(name: str) -> bool:
    """Return whether a file of this name is read by rows."""
    return _suffix(name) in ROW_SUFFIXES


def fingerprint(file: Path, size: int, limit: int) -> str:
    """Return a digest of the content; of a file over `limit` bytes, of sixteen blocks spread evenly over it."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            if size <= limit:
                while block := stream.read(1 << 20):
                    digest.update(block)
            else:
                length = limit // 16
                for index in range(16):
                    stream.seek((size - length) * index // 15)
                    digest.update(stream.read(length))
    except OSError as error:
        raise unreadable(str(file), error) from error
    return digest.hexdigest()


def read_spans(spans: tuple[Span, ...], text_field: str) -> Iterator[Row]:
    """Yield the documents of some spans.

    Raises: DataError when a file cannot be read at all.
    """
    for span in spans:
        try:
            if is_rows(span.path):
                yield from read_rows(span, text_field)
            else:
                yield read_text(span.path)
        except (OSError, EOFError, zlib.error) as error:
            raise unreadable(span.path, error) from error


def read_text(path: str) -> Row:
    """Return a text file as one document, less the byte order mark it may begin with."""
    with open_bytes(path) as file:
        data = file.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return not_utf8(path, path, error.start, data[error.start])
    return Document(text.removeprefix("\ufeff"), path)


def not_utf8(where: str, path: str, offset: int, byte: int) -> BadRow:
    """Return the bad row for bytes that are not UTF-8, naming the first such byte of the file."""
    error = DataError(
        f"{where} is not UTF-8: byte 0x{byte:02x} at offset {offset}.",
        fix=f"Convert it, for example `iconv -f latin1 -t utf-8 {path}`, or skip such documents with --on-bad-row skip.",
    )
    return BadRow(error, "not UTF-8", where)


def read_rows(span: Span, text_field: str) -> Iterator[Row]:
    """Yield the rows of a JSONL file that begin inside the span; blank lines are no rows."""
    with open_bytes(span.path) as file:
        position = span.start
        if position > 0:
            file.seek(position - 1)
            position += len(file.readline()) - 1
        before = _counted(span.path, position)
        number = 0
        whole = is_packed(span.path)
        while whole or position < span.end:
            line = file.readline()
            if not line:
                return
            if line.strip():
                yield _row(line, span.path, position, text_field, partial(_place, span.path, before, number))
            number += 1
            position += len(line)


def _counted(path: str, offset: int) -> Callable[[], int]:
    """Return what says the number of the line at a byte: counted once, and only when a row from there on is bad."""
    return cache(lambda: line_number(path, offset))


def _place(path: str, before: Callable[[], int], number: int) -> str:
    return f"{path}, line {before() + number}"


def _row(line: bytes, path: str, offset: int, text_field: str, where: Callable[[], str]) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return not_utf8(where(), path, offset + error.start, line[error.start])
    except ValueError as error:
        return _bad(where(), "not JSON", f"is not JSON: {_complaint(error)}", "Repair the line, or skip such rows with --on-bad-row skip.")
    except RecursionError:
        return _bad(where(), "not JSON", "is nested too deeply", "Repair the line, or skip such rows with --on-bad-row skip.")
    text = row.get(text_field) if isinstance(row, dict) else None
    if isinstance(text, str):
        return Document(text, path, offset)
    return _no_text(row, where(), text_field)


def _complaint(error: ValueError) -> str:
    """Return what the JSON parser says, with the place in the line alone: the line is named already."""
    return f"{error.msg} at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)


def _no_text(row: Any, where: str, text_field: str) -> BadRow:
    if not isinstance(row, dict):
        return _bad(where, "not an object", "is not a JSON object", 'Write rows such as {"text": "..."}.')
    if text_field in row:
        kind = type(row[text_field]).__name__
        return _bad(where, f"{text_field!r} is not text", f"has {text_field!r}, but it is {kind}, not text", "Name the field with --text-field.")
    names = [name for name, value in row.items() if isinstance(value, str)]
    guess = nearest(text_field, names) or (max(names, key=lambda name: len(row[name])) if names else None)
    fix = f"Did you mean --text-field {guess}?" if guess else "Name the field that holds the text with --text-field."
    return _bad(where, f"no field {text_field!r}", f"has no field {text_field!r}", fix)


def _bad(where: str, reason: str, what: str, fix: str) -> BadRow:
    return BadRow(DataError(f"{where} {what}.", fix=fix), reason, where)
