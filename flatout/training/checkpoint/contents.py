"""The content of a checkpoint's files, checked and read without torch.

The digests of a manifest show that no byte has changed since it was written. This shows that what
was written is a whole state: every tensor of the index is in the files, with its dtype and shape.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from flatout.errors import CheckpointError
from flatout.files import sha256
from flatout.json_io import RESTORE, JsonObject, parsing, read_json
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import Base, Entry, Index, Size, Slice, read_index

WEIGHTS = "model/"
"""Prefix of the weights' names in an index."""
IMPORTED = ("config.json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Endings of files of another program's model."""
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


def digest_of(checkpoint: Path) -> str:
    """Return a digest of the weights of a checkpoint, from the digests of their files.

    The files of another program's model, which has no manifest of them, are read.

    Raises: CheckpointError when the manifest of a checkpoint is damaged.
    """
    if (checkpoint / catalog.MANIFEST).is_file():
        manifest = catalog.read_manifest(checkpoint).files
        prefix = WEIGHTS.replace("/", "-")
        files = {name: facts.sha256 for name, facts in manifest.items() if name.startswith(prefix)}
    else:
        found = checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]
        files = {path.name: sha256(path) for path in found if path.name.endswith(IMPORTED)}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def find_base(checkpoint: Path, base: Base) -> Path:
    """Return the path of a checkpoint's base, which may have moved together with the checkpoint.

    The base of a LoRA checkpoint are the weights that its adapters belong to.
    Raises: CheckpointError when it is missing or damaged, or has other weights now.
    """
    path = Path(base.path)
    if path.exists():
        if digest_of(path) != base.digest:
            raise CheckpointError(
                f"The weights in {path} have changed since the LoRA adapters in {checkpoint} were "
                "trained on them.",
                fix="Restore them from a copy: the adapters belong to the earlier ones.",
            )
    else:  # a directory above both may have been renamed: try each tail of the old path there
        tails = [Path(*path.parts[start:]) for start in range(1, len(path.parts))]
        tried = (above / tail for above in checkpoint.resolve().parents for tail in tails)
        moved = (found for found in tried if found.exists() and digest_of(found) == base.digest)
        path = next(moved, path)
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint} contains LoRA adapters, and the weights that they belong to, {path}, do "
            "not exist.",
            fix="Restore them there, or move both runs together.",
        )
    if (path / catalog.MANIFEST).exists():
        catalog.require_complete(path, check=catalog.check_unless("optimizer"))
    return path
