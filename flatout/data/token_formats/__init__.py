"""Formats in which other tools store tokens, one per file.

A format is a `TokenFormat`, which its file exports as `FORMAT`. `flatout import` finds the format
of a path, and writes the tokens to a dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from flatout.errors import DataError
from flatout.storage.files import Array
from flatout.storage.json_io import JsonObject

Documents = Literal["end-of-text", "chunk"]
"""Where documents end: at end-of-text tokens, or with each piece of tokens."""
FIELDS = ("input_ids", "tokens", "token_ids", "ids")
"""Usual names of the field that contains the tokens."""
DTYPES = ("uint16", "uint32", "uint64", "int16", "int32", "int64", "uint8")
"""Types that files without a header may contain."""
COPY = "Copy or write the file again."


@dataclass(frozen=True)
class Reading:
    """How to read token files, for formats that do not state it."""

    vocab_size: int
    """Number of ids. It decides between types that a file without a header may contain."""
    dtype: str | None = None
    """The type of the tokens of a file without a header. Guessed when None."""
    field: str | None = None
    """The array, key or column that contains the tokens, one of FIELDS, or the only one, when
    None."""


@dataclass(frozen=True)
class Piece:
    """The tokens of one file."""

    tokens: Array
    """Shape (T,), any integer type. It may be memory-mapped."""
    name: str
    """Where they come from, for messages: a path."""
    weight: int = 1
    """Its share of `Tokens.weight`."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of one input, which are read piece by piece."""

    weight: int
    """The sum of the pieces' weights: tokens, items or files, whatever is known without reading."""
    unit: str
    """What `weight` counts."""
    pieces: Callable[[], Iterator[Piece]]
    """Read the tokens. Raises DataError when they contradict the metadata."""
    metadata: JsonObject = field(default_factory=dict)
    """What the other tool recorded about them, for the manifest."""
    note: str | None = None
    """A guess that the user should know of."""


@dataclass(frozen=True)
class TokenFormat:
    """How to find and read the token files of another tool."""

    takes: Callable[[Path], bool]
    """Whether a file or directory is in this format. Reads little and raises nothing."""
    files: Callable[[Path], Sequence[Path]]
    """Return the files to read, in order. Raises DataError when one is missing."""
    open: Callable[[Path, Reading], Tokens]
    """Open a path that the format takes."""
    documents: Documents = "end-of-text"
    """Where documents end unless --documents is set."""


def damaged(path: Path | str, what: str) -> DataError:
    """Return the error for a file that is not what its format requires: `PATH WHAT.`"""
    return DataError(f"{path} {what}.", fix=COPY)


def tokens_field(names: Sequence[str], reading: Reading, path: Path, kind: str) -> str:
    """Return the name of the field that contains the tokens. `kind` is what such fields are called.

    Raises: DataError when the named one does not exist, or the choice is not clear.
    """
    if reading.field is not None and reading.field in names:
        return reading.field
    usual = [name for name in FIELDS if name in names]
    shown = ", ".join(map(repr, names[:10])) or "none"
    if reading.field is not None:
        raise DataError(
            f"{path} has no {kind} {reading.field!r}.",
            fix=f"Name a different one with --field: {shown}.",
        )
    if usual or len(names) == 1:
        return usual[0] if usual else names[0]
    raise DataError(
        f"{path} has {len(names)} {kind}s, and it is not clear which contains the tokens.",
        fix=f"Name it with --field: {shown}." if names else COPY,
    )


def require_tokens(dtype: np.dtype[np.generic], shape: Sequence[int], where: str) -> None:
    """Check that an array is a row of integers.

    Raises: DataError.
    """
    if dtype.kind not in "iu":
        shown = "Python objects" if dtype.hasobject else str(dtype)
        raise DataError(
            f"{where} contains {shown}, not integers.",
            fix="Name token ids of an integer type"
            + (": a file that needs a pickle is never read." if dtype.hasobject else "."),
        )
    if not 1 <= len(shape) <= 2:
        raise DataError(
            f"{where} has the shape {tuple(shape)}.",
            fix="Write the tokens one after the other: tokens.reshape(-1).",
        )
