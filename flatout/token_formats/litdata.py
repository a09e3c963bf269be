"""Chunks of litdata (lightning.data): an index.json with chunk-R-N.bin files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import DataError
from flatout.files import Array
from flatout.json_io import JsonObject
from flatout.token_formats import Piece, Reading, TokenFormat, Tokens, damaged, tokens_field
from flatout.token_formats.indexed import (
    INDEX,
    item_offsets,
    joined,
    read_index,
    require_files,
    shard_path,
    unpacked,
)

TORCH_TYPES = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8"}
NUMPY_TYPES = {0: "i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "u1", 5: "<u2", 6: "<u4", 7: "<u8"}
"""Integer types by their number in litdata, for tensors and for arrays."""
_WORD = np.dtype("<u4")


@dataclass(frozen=True)
class _Chunk:
    path: Path
    num_items: int
    num_bytes: int
    has_tokens_only: bool
    """Whether the items are bare tokens (litdata's TokensLoader), not lists of fields."""


def _index(path: Path) -> JsonObject | None:
    found = read_index(path, "chunks")
    return found if found is not None and isinstance(found.get("config"), dict) else None


def takes(path: Path) -> bool:
    """Return whether a path is a directory with litdata's index.json."""
    return _index(path) is not None


def files(path: Path) -> list[Path]:
    """Return the chunks in order.

    Raises: DataError when one is missing.
    """
    chunks = _chunks(path, _index(path) or {})
    return list(require_files(path, [chunk.path for chunk in chunks]))


def _chunks(folder: Path, index: JsonObject) -> list[_Chunk]:
    try:
        return [
            _Chunk(
                shard_path(folder, chunk["filename"]),
                int(chunk["chunk_size"]),
                int(chunk["chunk_bytes"]),
                chunk.get("dim") is not None,
            )
            for chunk in index.get("chunks", ())
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder / INDEX, f"is damaged: {error!r}") from error


def open_litdata(path: Path, reading: Reading) -> Tokens:
    """Open a directory of litdata; each item is a document.

    Raises: DataError when a chunk does not match the index, or no field contains tokens.
    """
    index = _index(path) or {}
    config, chunks = index["config"], _chunks(path, index)
    if config.get("encryption"):
        raise DataError(f"{path} is encrypted.", fix="Write the dataset again without encryption.")
    formats = [str(name) for name in config.get("data_format") or ()]
    names = _field_names(config.get("data_spec"), len(formats))
    number = names.index(tokens_field(names, reading, path, "field"))
    field = _Field(number, formats[number], len(formats))
    field.require_tokens(path)

    def pieces() -> Iterator[Piece]:
        for chunk in chunks:
            data = unpacked(chunk.path, config.get("compression"), chunk.num_bytes)
            offsets = item_offsets(data, chunk.path, chunk.num_items)
            tokens, ends = field.read(data, offsets, chunk)
            yield Piece(tokens, str(chunk.path), chunk.num_items, ends[ends > 0])

    return Tokens(sum(chunk.num_items for chunk in chunks), "items", pieces)


FORMAT = TokenFormat(takes=takes, files=files, open=open_litdata, documents="stored")


def _field_names(spec: object, count: int) -> list[str]:
    """Return the names of the fields of an item: the keys of a dict, or numbers."""
    try:
        root: Any = json.loads(str(spec))[1]
        keys = json.loads(root["context"]) if isinstance(root["context"], str) else root["context"]
        if root["type"] == "builtins.dict" and len(keys) == count:
            return [str(key) for key in keys]
    except (IndexError, KeyError, TypeError, ValueError):
        pass  # a list, a tuple or a single array, or the description of an earlier version
    return [str(number) for number in range(count)]


@dataclass(frozen=True)
class _Field:
    """The field of an item that contains the tokens."""

    number: int
    format: str
    """Such as `no_header_tensor:16`."""
    num_fields: int

    @property
    def _dtype(self) -> np.dtype[np.generic] | None:
        """The type, if the index states it."""
        kind, _, number = self.format.partition(":")
        types = {"no_header_tensor": TORCH_TYPES, "no_header_numpy": NUMPY_TYPES}.get(kind, {})
        return np.dtype(types[int(number)]) if number.isdigit() and int(number) in types else None

    def require_tokens(self, path: Path) -> None:
        """Check that the field contains integers.

        Raises: DataError.
        """
        if self._dtype is None and self.format not in ("tensor", "numpy"):
            raise DataError(
                f"{path} stores {self.format!r} where tokens are expected.",
                fix="Name the field that contains arrays of token ids with --field"
                + ("; a pickle is never read." if self.format == "pickle" else "."),
            )

    def read(self, data: Array, offsets: Array, chunk: _Chunk) -> tuple[Array, Array]:
        """Return the tokens of a chunk, and where its items end.

        Shapes:  data (bytes,) uint8, offsets (items + 1,); returns (T,) and (documents,).
        """
        try:
            if chunk.has_tokens_only:
                assert self._dtype is not None
                ends = (offsets[1:] - offsets[0]) // self._dtype.itemsize
                return data[offsets[0] :].view(self._dtype), np.unique(ends)
            return joined(
                [self._item(data[start:stop], chunk) for start, stop in pairwise(offsets)]
            )
        except (AssertionError, IndexError, KeyError, ValueError) as error:
            raise damaged(chunk.path, f"has an item that cannot be read: {error}") from error

    def _item(self, data: Array, chunk: _Chunk) -> Array:
        """Return the tokens of an item: the sizes of its fields, then the fields."""
        sizes = data[: 4 * self.num_fields].view(_WORD)
        start = 4 * self.num_fields + int(sizes[: self.number].sum(dtype=np.int64))
        found = data[start : start + int(sizes[self.number])]
        if len(found) != sizes[self.number]:
            raise damaged(chunk.path, "has a field that is longer than its item")
        if self._dtype is not None:
            return found.view(self._dtype)
        number, dimensions = (int(word) for word in found[:8].view(_WORD))
        types = TORCH_TYPES if self.format == "tensor" else NUMPY_TYPES
        return found[8 + 4 * dimensions :].view(types[number])
