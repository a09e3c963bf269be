"""Directories of shards that an index.json lists, as litdata and MosaicML's streaming write."""

from __future__ import annotations

import bz2
import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from flatout.errors import DataError
from flatout.files import Array
from flatout.json_io import JsonObject
from flatout.sources.packed import import_package
from flatout.token_formats import damaged

INDEX = "index.json"
MAX_INDEX_BYTES = 1 << 30
OFFSET = np.dtype("<u4")


def read_index(folder: Path, key: str) -> JsonObject | None:
    """Return a directory's index, when it is an object with a list under `key`."""
    path = folder / INDEX
    try:
        if not path.is_file() or path.stat().st_size > MAX_INDEX_BYTES:
            return None
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get(key), list) else None


def shard_path(folder: Path, name: object) -> Path:
    """Return the path of a shard.

    Raises: DataError when the name leads out of the directory.
    """
    parts = PurePosixPath(str(name)).parts
    if not isinstance(name, str) or not parts or ".." in parts or parts[0] == "/":
        raise damaged(folder / INDEX, f"names a file outside its directory: {str(name)[:80]!r}")
    return folder / name


def require_files(folder: Path, paths: Sequence[Path]) -> Sequence[Path]:
    """Return the paths.

    Raises: DataError when one does not exist, or there are none.
    """
    missing = [path for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"{folder / INDEX} lists {missing[0].name}{more}, which {folder} does not contain.",
            fix="Copy the missing files there.",
        )
    if not paths:
        raise damaged(folder / INDEX, "lists no files")
    return paths


def unpacked(path: Path, compression: str | None, num_bytes: int) -> Array:
    """Return the bytes of a shard, memory-mapped if it is not compressed.

    Shapes:  returns (num_bytes,), uint8.
    Memory: the shard, if it is compressed.
    Raises: DataError when it does not have that size; MissingPackage.
    """
    if compression is None:
        if path.stat().st_size != num_bytes or not num_bytes:
            raise damaged(path, f"has {path.stat().st_size:,} bytes; {INDEX} says {num_bytes:,}")
        return np.asarray(np.memmap(path, np.uint8, "r"))
    kind = compression.partition(":")[0]
    if kind not in _UNPACK:
        raise DataError(
            f"{path} is compressed with {kind}, which is not supported.",
            fix="Write the dataset again without compression, or with zstd, gz or bz2.",
        )
    try:
        content = _UNPACK[kind](path, num_bytes)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise damaged(path, f"cannot be decompressed: {error}") from error
    if len(content) != num_bytes:
        raise damaged(path, f"decompresses to another size than {INDEX} says")
    return np.frombuffer(content, np.uint8)


def _unpack_zstd(path: Path, num_bytes: int) -> bytes:
    zstandard = import_package("zstandard", str(path), extra="zstd")
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(path.read_bytes())
        return bytes(reader.read(num_bytes + 1))
    except zstandard.ZstdError as error:
        raise damaged(path, f"cannot be decompressed: {error}") from error


def _unpack_with(module: Any) -> Callable[[Path, int], bytes]:
    def unpack(path: Path, num_bytes: int) -> bytes:
        with module.open(path) as file:
            return bytes(file.read(num_bytes + 1))

    return unpack


_UNPACK: dict[str, Callable[[Path, int], bytes]] = {
    "zstd": _unpack_zstd,
    "gz": _unpack_with(gzip),
    "bz2": _unpack_with(bz2),
}


def item_offsets(data: Array, path: Path, num_items: int) -> Array:
    """Return where the items of a shard start, and where the last one ends.

    A shard starts with their number and the offsets.

    Shapes:  data (bytes,) uint8; returns (num_items + 1,).
    Raises: DataError when they are not within the shard.
    """
    start = 4 * (num_items + 2)
    if num_items < 1 or len(data) < start or int(data[:4].view(OFFSET)[0]) != num_items:
        raise damaged(path, f"does not start with {num_items:,} items, as {INDEX} says")
    offsets = np.asarray(data[4:start].view(OFFSET), np.int64)
    if offsets[0] < start or (np.diff(offsets) < 0).any() or offsets[-1] != len(data):
        raise damaged(path, "has offsets that do not fit its size")
    return offsets


def joined(items: Sequence[Array]) -> tuple[Array, Array]:
    """Return the tokens of some items, and the position after each item that is not empty.

    Shapes:  items (T,) each; returns (sum of T,) and (documents,).
    """
    return np.concatenate(items), np.unique(np.cumsum([len(item) for item in items]))
