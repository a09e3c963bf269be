"""The content of a checkpoint's files, checked and read without torch.

The digests of a manifest show that no byte has changed since it was written. This shows that what
was written is a whole state: every tensor of the index is in the files, with its dtype and shape.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from flatout.errors import CheckpointError
from flatout.progress import SILENT, Progress
from flatout.storage.files import copy_whole, sha256
from flatout.storage.json_io import RESTORE, JsonObject, parsing, read_json
from flatout.storage.whole import replacing
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import Base, Index, read_index

WEIGHTS = "model/"
"""Prefix of the weights' names in an index."""
MODEL_FILES = ("config.json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Endings of files of another tool's model."""
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
INFINITY: dict[str, tuple[Any, int]] = {
    "F64": (np.uint64, 0xFFE0_0000_0000_0000),
    "F32": (np.uint32, 0xFF00_0000),
    "F16": (np.uint16, 0xF800),
    "BF16": (np.uint16, 0xFF00),
}
"""Integers of a dtype's size, and infinity as one of them, shifted left so that the sign is gone.

Larger ones are not numbers.
"""
CHUNK = 1 << 22
"""Values that are looked at together."""


def stored_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype, as the format names it, and the shape of each tensor of a file.

    Raises: CheckpointError when the file is missing or is not a safetensors file.
    """
    try:
        with safe_open(path, framework="np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in parts.items()}
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error}.", fix=RESTORE) from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged: it is not a safetensors file.", fix=RESTORE
        ) from error


def content_problems(checkpoint: Path) -> list[str]:
    """Return what is wrong with the content of a checkpoint whose files match its manifest.

    Tensors that the files lack or have with a different dtype or shape, slices that do not cover
    their tensor, values that are not numbers, a state of a different step, and a missing base of
    LoRA adapters.
    """
    try:
        index = read_index(checkpoint)
        problems = [*_tensor_problems(checkpoint, index), *_state_problems(checkpoint)]
        problems = problems or [*_value_problems(checkpoint, index)]
        if index.base:
            find_base(checkpoint, index.base)
    except CheckpointError as error:
        return [error.what]
    return problems


def problems_of(checkpoint: Path, *, progress: Progress = SILENT) -> list[str]:
    """Return all problems of a checkpoint, in its files and content. Empty when it is valid."""
    return catalog.verify(checkpoint, progress=progress) or content_problems(checkpoint)


def _tensor_problems(checkpoint: Path, index: Index) -> Iterator[str]:
    files: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, entry in index.tensors.items():
        covered = 0
        for piece in entry.slices:
            if piece.file not in files:
                files[piece.file] = stored_tensors(checkpoint / piece.file)
            stored = files[piece.file].get(piece.name or name)
            if stored is None:
                yield f"{checkpoint / piece.file} has no tensor {piece.name or name}."
                break
            wanted = STORED_DTYPES.get(entry.dtype, stored[0]), piece.shape
            if stored != wanted:
                yield (
                    f"{checkpoint / piece.file}: {name} is {stored[0]} {list(stored[1])}. "
                    f"The index lists {wanted[0]} {list(wanted[1])}."
                )
            covered += math.prod(piece.shape)
        else:
            within = (
                offset + size <= whole
                for piece in entry.slices
                for offset, size, whole in zip(piece.offset, piece.shape, entry.shape, strict=True)
            )
            if covered != math.prod(entry.shape) or not all(within):
                yield f"{checkpoint / catalog.INDEX}: the slices of {name} do not cover it."


def _value_problems(checkpoint: Path, index: Index) -> Iterator[str]:
    for file in sorted({piece.file for entry in index.tensors.values() for piece in entry.slices}):
        content = np.memmap(checkpoint / file, np.uint8, "r")
        begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
        for name, stated in json.loads(content[8:begin].tobytes()).items():
            if stated.get("dtype") not in INFINITY:
                continue
            words, infinity = INFINITY[stated["dtype"]]
            start, end = stated["data_offsets"]
            values = content[begin + start : begin + end].view(words)
            chunks = (values[at : at + CHUNK] for at in range(0, len(values), CHUNK))
            if any((chunk << 1 > words(infinity)).any() for chunk in chunks):
                yield f"{checkpoint / file}: {name} has values that are not numbers (NaN)."


def _state_problems(checkpoint: Path) -> Iterator[str]:
    path, step = checkpoint / catalog.STATE, catalog.step_of(checkpoint)
    state = read_state(checkpoint)
    with parsing(path):
        steps = {"step": state["step"], "values.step": state["values"]["step"]}
    for name, found in steps.items():
        if found != step:
            yield f"{path} is damaged: {name} is {found} in the checkpoint of step {step}."


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


BASES, DIGITS = "base", 16
"""Where a run keeps the weights that its adapters belong to: base/DIGEST/step-N."""


def digest_of(checkpoint: Path) -> str:
    """Return a digest of the weights of a checkpoint, from the digests of their files.

    The files of another tool's model, which has no manifest of them, are read.

    Raises: CheckpointError when the manifest of a checkpoint is damaged.
    """
    if catalog.is_checkpoint(checkpoint):
        listed = catalog.read_manifest(checkpoint).files
        files = {one.name: one.sha256 for one in listed if one.name.startswith(catalog.MODEL)}
    else:
        found = checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]
        files = {path.name: sha256(path) for path in found if path.name.endswith(MODEL_FILES)}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def keep_base(run_folder: Path, base: Path, digest: str) -> Path:
    """Return a copy of a checkpoint's weights in a run directory, of hard links where possible.

    The run may then move alone, and that of the base may delete the checkpoint. The files of
    another tool's model stay where they are.
    Raises: CheckpointError when the base has a base, which is missing.
    """
    kept = run_folder / BASES / digest[:DIGITS] / base.name
    if kept.exists():
        return kept
    if not catalog.is_checkpoint(base):
        return base
    if inner := read_index(base).base:
        keep_base(run_folder, find_base(base, inner), inner.digest)
    with replacing(kept) as unfinished:
        for file in base.iterdir():
            if not file.name.startswith(catalog.OPTIMIZER):
                try:
                    os.link(file, unfinished / file.name)
                except OSError:  # a different disk, or one without hard links
                    copy_whole(file, unfinished / file.name)
    return kept


def find_base(checkpoint: Path, base: Base) -> Path:
    """Return the path of a checkpoint's base: the copy in its run, or where it was.

    The base of a LoRA checkpoint are the weights that its adapters belong to.
    Raises: CheckpointError when it is missing or damaged, or has other weights now.
    """
    path = Path(base.path)
    above = checkpoint.resolve().parents[:3]  # RUN/checkpoints/step-N, RUN/base/DIGEST/step-N
    kept = (folder / BASES / base.digest[:DIGITS] / path.name for folder in above)
    for found in (*kept, path):
        if found.exists() and digest_of(found) == base.digest:
            if catalog.is_checkpoint(found):
                catalog.require_complete(found, deep="weights")
            return found
    if path.exists():
        raise CheckpointError(
            f"The weights in {path} have changed since the LoRA adapters in {checkpoint} were "
            "trained on them.",
            fix="Restore them from a copy: the adapters belong to the earlier ones.",
        )
    raise CheckpointError(
        f"{checkpoint} contains LoRA adapters, but the weights that they belong to, {path}, do "
        "not exist.",
        fix="Restore them there.",
    )
