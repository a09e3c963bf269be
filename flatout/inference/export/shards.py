"""Writes safetensors files tensor by tensor: only one tensor is in memory at a time.

The format: the length of the header as eight bytes, the header as JSON (dtype, shape and byte
range of each tensor), then the bytes of the tensors in that order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.files import sync
from flatout.json_io import JsonObject, write_json
from flatout.progress import Task

STEM = "model"
INDEX = f"{STEM}.safetensors.index.json"
METADATA = {"format": "pt"}
"""What transformers expects in the header."""
_ALIGNMENT = 8
"""The length of a header is a multiple of this."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Planned:
    """A tensor of an export, read when it is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Its size in a file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def loaded(self) -> Tensor:
        """Return its values, contiguous on the CPU.

        Shapes: as planned.
        """
        tensor = self.read().contiguous()
        assert (tensor.dtype, tuple(tensor.shape)) == (self.dtype, self.shape), self.name
        return tensor


def write_shards(folder: Path, planned: Sequence[Planned], max_bytes: int, task: Task) -> None:
    """Write tensors to one file, or to files of at most `max_bytes` with an index.

    A tensor is never divided: a larger one gets a file of its own.
    """
    shards = list(_shards(planned, max_bytes))
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        path = folder / f"{STEM}{part}.safetensors"
        write_safetensors(path, shard, task)
        files |= {tensor.name: path.name for tensor in shard}
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensor in planned)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def _shards(planned: Sequence[Planned], max_bytes: int) -> Iterator[list[Planned]]:
    shard: list[Planned] = []
    size = 0
    for tensor in planned:
        if shard and size + tensor.num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    yield shard


def write_safetensors(path: Path, planned: Sequence[Planned], task: Task) -> None:
    """Write one safetensors file, and flush it to the disk."""
    header: JsonObject = {"__metadata__": METADATA}
    end = 0
    for tensor in planned:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _dtype_name(tensor),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in planned:
            file.write(raw_bytes(tensor.loaded()))
            task.advance(tensor.num_bytes)
    sync(path)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy.

    Shapes: any.
    """
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _dtype_name(tensor: Planned) -> str:
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{tensor.name} has the type {tensor.dtype}, which safetensors files here lack.",
            fix="Export with --dtype float32.",
        )
    return _DTYPES[tensor.dtype]
