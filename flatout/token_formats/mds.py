"""Shards of MosaicML's streaming (MDS): an index.json with shard.NNNNN.mds files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

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
from flatout.token_formats.raw import guess_dtype, require_dtype

NUMBERED_TYPES = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    32: "<u4",
    33: "<i4",
    64: "<u8",
    65: "<i8",
}
"""Integer types by their number in an array whose column does not state one."""
SAMPLED = 64
"""Samples of a shard that are read to guess the type of bytes."""
SAMPLED_BYTES = 1 << 14
"""Bytes of samples that are enough for that."""
NAMED_TYPES = {np.dtype(code).name: np.dtype(code) for code in NUMBERED_TYPES.values()}


@dataclass(frozen=True)
class _Shard:
    path: Path
    compression: str | None
    num_bytes: int
    samples: int
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    """The bytes of each column; None where each sample states them."""


def takes(path: Path) -> bool:
    """Return whether a path is a directory with an index.json of MDS shards."""
    index = read_index(path, "shards")
    return index is not None and all(
        isinstance(shard, dict) and shard.get("format") == "mds" for shard in index["shards"]
    )


def files(path: Path) -> list[Path]:
    """Return the shards in order.

    Raises: DataError when one is missing.
    """
    return list(require_files(path, [shard.path for shard in _shards(path)]))


def _shards(folder: Path) -> list[_Shard]:
    index = read_index(folder, "shards") or {}
    try:
        return [_shard(folder, shard) for shard in index.get("shards", ())]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder / INDEX, f"is damaged: {error!r}") from error


def _shard(folder: Path, shard: JsonObject) -> _Shard:
    """Return a shard; the uncompressed file is preferred if it is there."""
    raw, packed = shard["raw_data"], shard.get("zip_data")
    path, compression = shard_path(folder, raw["basename"]), None
    if packed and not path.is_file():
        path, compression = shard_path(folder, packed["basename"]), str(shard["compression"])
    return _Shard(
        path,
        compression,
        int(raw["bytes"]),
        int(shard["samples"]),
        tuple(map(str, shard["column_names"])),
        tuple(map(str, shard["column_encodings"])),
        tuple(shard["column_sizes"]),
    )


def open_mds(path: Path, reading: Reading) -> Tokens:
    """Open a directory of MDS shards; each sample is a document.

    Raises: DataError when a shard does not match the index, or no column contains tokens.
    """
    require_dtype(reading)
    shards = [shard for shard in _shards(path) if shard.samples]
    columns = [shard.encodings[_column(shard, reading)] for shard in shards]
    note = None
    if reading.dtype is None and "bytes" in columns:
        reading = replace(reading, dtype=_guess(shards, reading))
        note = f"The bytes in {path.name} are read as {reading.dtype}; --dtype names another type."

    def pieces() -> Iterator[Piece]:
        for shard in shards:
            data = unpacked(shard.path, shard.compression, shard.num_bytes)
            offsets = item_offsets(data, shard.path, shard.samples)
            tokens, ends = joined(_read(shard, data, offsets, reading))
            yield Piece(tokens, str(shard.path), shard.samples, ends[ends > 0])

    return Tokens(sum(shard.samples for shard in shards), "samples", pieces, note=note)


FORMAT = TokenFormat(takes=takes, files=files, open=open_mds, documents="stored")


def _column(shard: _Shard, reading: Reading) -> int:
    """Return the number of the column that contains the tokens.

    Raises: DataError when there is none, or it contains something else.
    """
    name = tokens_field(shard.names, reading, shard.path, "column")
    number = shard.names.index(name)
    kind, _, rest = shard.encodings[number].partition(":")
    dtype = rest.partition(":")[0]
    if (kind != "ndarray" or (dtype and dtype not in NAMED_TYPES)) and kind != "bytes":
        raise DataError(
            f"{shard.path} stores {shard.encodings[number]!r} in its column {name!r}, not tokens.",
            fix="Name the column with arrays or bytes of token ids: --field NAME"
            + ("; a pickle is never read." if kind == "pkl" else "."),
        )
    return number


def _read(shard: _Shard, data: Array, offsets: Array, reading: Reading) -> list[Array]:
    """Return the tokens of samples.

    Raises: DataError when one is damaged.
    """
    try:
        return _samples(shard, data, offsets, reading)
    except (IndexError, KeyError, ValueError) as error:
        what = f"has a sample that cannot be read: {error}"
        raise damaged(shard.path, what) from error


def _samples(shard: _Shard, data: Array, offsets: Array, reading: Reading) -> list[Array]:
    """Return the tokens of every sample: the sizes that vary, then the columns."""
    number = _column(shard, reading)
    varies = [size is None for size in shard.sizes]
    head = 4 * sum(varies)
    dtype = _stated_dtype(shard.encodings[number], reading)
    found = []
    for first, last in pairwise(offsets):
        sample = data[first:last]
        stated = iter(sample[:head].view("<u4"))
        sizes = [int(next(stated)) if size is None else size for size in shard.sizes]
        start = head + sum(sizes[:number])
        if start + sizes[number] > len(sample):
            what = "has a sample that cannot be read: a column is longer than it"
            raise damaged(shard.path, what)
        found.append(_tokens(sample[start : start + sizes[number]], shard.encodings[number], dtype))
    return found


def _tokens(value: Array, encoding: str, dtype: np.dtype[np.generic] | None) -> Array:
    """Return the tokens in a value: its type and its shape come first, unless the column has them.

    Shapes:  value (bytes,) uint8; returns (T,).
    """
    start = 0
    if encoding != "bytes":
        if dtype is None:
            dtype, start = np.dtype(NUMBERED_TYPES[int(value[0])]), 1
        if encoding.count(":") < 2:
            dimensions, width = int(value[start]) >> 2, 1 << (int(value[start]) & 3)
            start += 1 + dimensions * width
    assert dtype is not None
    return value[start:].view(dtype)


def _stated_dtype(encoding: str, reading: Reading) -> np.dtype[np.generic] | None:
    """Return the type of a column's values; None when each value states it."""
    if encoding == "bytes":
        return np.dtype(reading.dtype).newbyteorder("<")
    return NAMED_TYPES.get(encoding.partition(":")[2].partition(":")[0])


def _guess(shards: Sequence[_Shard], reading: Reading) -> str:
    """Return the widest type that fits the first samples of a column of bytes."""
    as_bytes = replace(reading, dtype="uint8")
    sample = b""
    for shard in shards:
        data = unpacked(shard.path, shard.compression, shard.num_bytes)
        offsets = item_offsets(data, shard.path, shard.samples)
        first = _read(shard, data, offsets[: SAMPLED + 1], as_bytes)
        sample += b"".join(value.tobytes() for value in first)
        if len(sample) >= SAMPLED_BYTES:
            break
    return guess_dtype(sample, reading.vocab_size) or "uint16"
