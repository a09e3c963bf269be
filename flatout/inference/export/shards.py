"""Writes safetensors files shard by shard: one file's tensors are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from flatout.progress import Progress
from flatout.storage.files import not_written, sync
from flatout.storage.json_io import write_json

INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}
"""What transformers expects in the header."""


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
        """Return its values on the CPU, contiguous and alone in their memory, as save_file needs.

        Shapes: as planned.
        """
        tensor = self.read().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        assert (tensor.dtype, tuple(tensor.shape)) == (self.dtype, self.shape), self.name
        return tensor


def write_shards(
    folder: Path, planned: Sequence[Planned], max_bytes: int, progress: Progress
) -> None:
    """Write tensors to one file, or to files of at most `max_bytes` with an index.

    A tensor is never divided: a larger one gets a separate file.
    Raises: OSError of the disk; Unfinished and DataError as `writing`.
    """
    shards = list(_shards(planned, max_bytes))
    total = sum(tensor.num_bytes for tensor in planned)
    files: dict[str, str] = {}
    with progress.task("Writing weights", total=total, unit="bytes") as task:
        for number, shard in enumerate(shards, 1):
            part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            path = folder / f"model{part}.safetensors"
            loaded = {}
            for tensor in shard:
                loaded[tensor.name] = tensor.loaded()
                task.advance(tensor.num_bytes)
            try:
                save_file(loaded, path, METADATA)
            except SafetensorError as error:
                raise not_written(path, error) from error
            sync(path)
            files |= {tensor.name: path.name for tensor in shard}
    if len(shards) > 1:
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
