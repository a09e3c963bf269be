"""JSON documents and JSON lines on disk. Errors name the damaged file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard, TypeVar

from pydantic import BaseModel, ValidationError

from flatout.display import Display, displayed, terminal_text
from flatout.errors import CheckpointError, DataError, UsageError
from flatout.storage.files import Stored, open_own, write_text
from flatout.storage.recognised import open_regular, read_regular
from flatout.storage.streams import printable

Document = TypeVar("Document", bound=BaseModel)
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A value to be written as JSON."""
JsonObject: TypeAlias = dict[str, Any]
"""A mapping with string keys, read from JSON or YAML. Code that reads a key checks its value."""

RESTORE = "Restore it from a copy."
"""The fix for a damaged file."""


def is_finite(value: object) -> TypeGuard[int | float]:
    """Return whether a value read from JSON is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


class Result(Stored):
    """The result of a command: `--json` prints its fields. Its `display` is for people."""

    def display(self) -> Display:
        """Return what is shown of it. Empty if everything has been printed already."""
        return displayed(self)

    def summary(self) -> str:
        """Return the closing lines as plain text."""
        return terminal_text(self.display())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the summary in IPython and notebooks."""
        printer.text(printable(self.summary()) or repr(self))

    @property
    def exit_code(self) -> int:
        """The exit code of the process after the result is printed."""
        return 0


def write_json(path: Path, document: Json) -> None:
    """Write `document` as JSON, atomically and durably. Floats read back unchanged."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def read_json(path: Path, *, kind: type[UsageError] = CheckpointError, fix: str = RESTORE) -> Any:
    """Return the JSON document in `path`.

    Raises: `kind` naming the file when it is missing or is not JSON.
    """
    try:
        return json.loads(read_regular(path))
    except OSError as error:
        raise kind(f"Cannot read {path}: {error.strerror}.", fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise kind(f"{path} is damaged: it is not JSON.", fix=fix) from error


def read_object(path: Path, *, kind: type[UsageError] = DataError, fix: str) -> JsonObject:
    """Return the JSON object in `path`.

    Raises: `kind` naming the file when it is missing or is not an object.
    """
    document = read_json(path, kind=kind, fix=fix)
    if not isinstance(document, dict):
        raise kind(f"{path} is not a JSON object.", fix=fix)
    return document


def read_model(path: Path, model: type[Document], *, fix: str = RESTORE) -> Document:
    """Return the JSON document in `path` as a `model`.

    Values are not converted, and unknown keys are ignored.
    Raises: CheckpointError naming the file and the key when the file is missing, is not JSON, or
            does not fit the model.
    """
    try:
        return model.model_validate(read_json(path), strict=True)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {_first(error)}.", fix=fix) from error


def _first(error: ValidationError) -> str:
    """Return the first problem that pydantic found, with its key."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else str(first["msg"])


@contextmanager
def parsing(path: Path | str) -> Iterator[None]:
    """Turn errors inside the block into a CheckpointError that reports `path` as damaged.

    For code that parses a document read from `path`: a missing key, or a value of the wrong type
    or nesting, means that the file is damaged.
    Raises: CheckpointError.
    """
    try:
        yield
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {_first(error)}.", fix=RESTORE) from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error}.", fix=RESTORE
        ) from error


def append_line(path: Path, document: Mapping[str, Json]) -> None:
    """Append one JSON line to `path`.

    If a kill left the last line unfinished, a newline is written first to keep this line intact.
    """
    line = json.dumps(document).encode() + b"\n"
    with os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)


def finite_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a JSON object that are finite numbers."""
    return {name: value for name, value in line.items() if is_finite(value)}


class LineReader:
    """Reads a file of JSON lines, which may still grow.

    A line that is not a JSON object is omitted, and listed in `damaged`. A missing file has no
    lines.
    """

    def __init__(self, path: Path, *, tail_bytes: int | None = None) -> None:
        """Read all lines, or only those that start in the last `tail_bytes` of the file."""
        self.path = path
        self._tail_bytes = tail_bytes
        self.damaged: list[int] = []
        """The numbers of the lines that were omitted, counted from 1."""
        self.is_cut_off = False
        """Whether the file ends within a line."""
        self.lines = 0
        """Lines read so far, without the one that is cut off."""

    def notes(self, *, is_growing: bool = False) -> list[str]:
        """Return what was omitted, as sentences. The last line of a file that grows may be cut."""
        name, damaged = self.path.name, len(self.damaged)
        found = []
        if self.is_cut_off and not is_growing:
            found.append(f"The last line of {name} (line {self.lines + 1}) is incomplete, skipped.")
        if damaged:
            lines = f"{damaged:,} damaged line{'s' * (damaged > 1)}"
            found.append(f"{name} has {lines} (the first is line {self.damaged[0]}), skipped.")
        return found

    def read(self) -> Iterator[JsonObject]:
        """Yield the objects, once.

        Raises: CheckpointError when the file cannot be read.
        """
        if not self.path.exists():
            return
        try:
            descriptor = open_regular(self.path)
        except OSError as error:
            raise CheckpointError(
                f"Cannot read {self.path}: {error.strerror}.", fix=RESTORE
            ) from error
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            if self._tail_bytes is not None and size > self._tail_bytes:
                file.seek(size - self._tail_bytes)
                file.readline()
            for line in file:
                document = object_or_none(line)
                if document is None and not line.endswith(b"\n"):
                    self.is_cut_off = True
                    return
                self.lines += 1
                if document is not None:
                    yield document
                elif line.strip():
                    self.damaged.append(self.lines)


def object_or_none(line: str | bytes) -> JsonObject | None:
    """Return the JSON object in a line. None when it is damaged."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
