"""The content of a checkpoint's files, checked and read without torch.

The digests of a manifest show that no byte has changed since it was written. This shows that what
was written is a whole state: every tensor of the index is in the files, with its dtype and shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from flatout.errors import CheckpointError
from flatout.json_io import RESTORE, JsonObject, parsing, read_json
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.base import find_base
from flatout.training.checkpoint.catalog import Entry, Index, Size, Slice, read_index

LENGTH_BYTES = 8
"""A safetensors file starts with the length of its header, a little-endian integer."""
MOST_HEADER_BYTES = 100_000_000
"""The limit of the format; a damaged length is not read into memory."""
STORED_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Names of dtypes in an index, which are torch's, and in a safetensors file."""


class StoredTensor(BaseModel):
    """The entry of a tensor in the header of a safetensors file."""

    dtype: str
    """As the format names it."""
    shape: tuple[Size, ...]
    """Its shape."""
    data_offsets: tuple[Size, Size]
    """Where its bytes start and end, counted from the end of the header."""


class TensorFile:
    """A safetensors file: its header, and the bytes of each tensor, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises: CheckpointError when the file is missing or is not a safetensors file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                header = json.loads(file.read(min(length, MOST_HEADER_BYTES)))
            header.pop("__metadata__", None)
            self.tensors = {
                name: StoredTensor.model_validate(entry) for name, entry in header.items()
            }
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error.strerror}.", fix=RESTORE) from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged: it is not a safetensors file.", fix=RESTORE
            ) from error
        self._start = LENGTH_BYTES + length

    def read(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, which are read from the file when they are used.

        Shapes: one dimension, of as many bytes as the tensor has.
        """
        first, end = self.tensors[name].data_offsets
        if first == end:
            return np.zeros(0, dtype=np.uint8)
        return np.memmap(
            self.path, dtype=np.uint8, mode="r", offset=self._start + first, shape=(end - first,)
        )


def content_problems(checkpoint: Path) -> list[str]:
    """Return what is wrong with the content of a checkpoint whose files match its manifest.

    Tensors that the files lack or have with another dtype or shape, slices that do not cover their
    tensor, a state of another step, and a missing base of LoRA adapters.
    """
    try:
        index = read_index(checkpoint)
        problems = [*_tensor_problems(checkpoint, index), *_state_problems(checkpoint)]
        if index.base:
            find_base(checkpoint, index.base)
    except CheckpointError as error:
        return [error.what]
    return problems


def problems_of(checkpoint: Path, *, progress: Progress = SILENT) -> list[str]:
    """Return everything that is wrong with a checkpoint, files and content; [] when it is valid."""
    return catalog.verify(checkpoint, progress=progress) or content_problems(checkpoint)


def _tensor_problems(checkpoint: Path, index: Index) -> Iterator[str]:
    files: dict[str, TensorFile] = {}
    for name, entry in index.tensors.items():
        covered = 0
        for piece in entry.slices:
            if piece.file not in files:
                files[piece.file] = TensorFile(checkpoint / piece.file)
            stored = files[piece.file].tensors.get(name)
            if stored is None:
                yield f"{checkpoint / piece.file} has no tensor {name}."
                break
            wanted = STORED_DTYPES.get(entry.dtype, stored.dtype), piece.shape
            if (stored.dtype, stored.shape) != wanted:
                yield (
                    f"{checkpoint / piece.file}: {name} is {stored.dtype} {list(stored.shape)}; "
                    f"the index says {wanted[0]} {list(wanted[1])}."
                )
            covered += math.prod(piece.shape)
        else:
            if covered != math.prod(entry.shape) or not all(
                _lies_within(entry, piece) for piece in entry.slices
            ):
                yield f"{checkpoint / catalog.INDEX}: the slices of {name} do not cover it."


def _lies_within(entry: Entry, piece: Slice) -> bool:
    """Return whether a slice lies within its tensor."""
    return len(piece.offset) == len(piece.shape) == len(entry.shape) and all(
        offset + size <= whole
        for offset, size, whole in zip(piece.offset, piece.shape, entry.shape, strict=True)
    )


def _state_problems(checkpoint: Path) -> Iterator[str]:
    path, step = checkpoint / catalog.STATE, catalog.step_of(checkpoint)
    state = read_state(checkpoint)
    with parsing(path):
        steps = {"step": state["step"], "values.step": state["values"]["step"]}
        ranks, world_size = len(state["ranks"]), state["world_size"]
    for name, found in steps.items():
        if found != step:
            yield f"{path} is damaged: {name} is {found} in the checkpoint of step {step}."
    if ranks != world_size:
        yield f"{path} is damaged: it has the states of {ranks} of {world_size} ranks."


def read_state(checkpoint: Path) -> JsonObject:
    """Return the content of state.json.

    Raises: CheckpointError when it is missing or damaged.
    """
    state = read_json(checkpoint / catalog.STATE)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{checkpoint / catalog.STATE} is damaged: it is not an object.", fix=RESTORE
        )
    return state
