"""Tensors as slices in safetensors files: each rank writes its part and reads only what it needs.

A tensor has one dtype and one global shape. A slice is a box of it, given by offset and shape.
DTensors are sliced as they are sharded. Of equal copies exactly one rank writes each, and the ranks
share the work. Any number of ranks can read what any other number wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flatout.distributed.tensor import Cut, boxes_of, is_shared, local
from flatout.errors import CheckpointError
from flatout.progress import Task
from flatout.storage.files import disk_fix
from flatout.storage.json_io import RESTORE
from flatout.training.checkpoint.catalog import Entry, Slice

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself. Both share memory with `tensor`.

    Shapes: tensor of any shape; the result has the shape of the part.
    """
    with torch.no_grad():
        return local(tensor.detach())


def owned(tensors: Mapping[str, Tensor], *, rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the tensors whose local part this rank writes, of `world_size` that have them.

    Each byte of each tensor is written by exactly one rank: the ranks with equal copies of DTensor
    parts take turns, and whole tensors, which every rank has, are distributed by size.

    Shapes: tensors of any shape, unchanged.
    """
    mine: dict[str, Tensor] = {}
    load, dealt = [0] * world_size, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].numel(), item[0])):
        if is_shared(tensor):
            copy, copies = _copy_of(tensor)
            if dealt % copies == copy and local_part(tensor).numel():
                mine[name] = tensor
            dealt += 1
            continue
        writer = load.index(min(load))
        load[writer] += max(tensor.numel() * tensor.element_size(), 1)
        if writer == rank:
            mine[name] = tensor
    return mine


def pieces(
    tensors: Mapping[str, Tensor], cuts: Mapping[str, Cut]
) -> Iterator[tuple[str, str, tuple[int, ...], Tensor]]:
    """Yield the boxes that this rank has: the tensor's name, the box's, its offset and its values.

    `cuts` has the tensors of which it may have several. Their names are numbered.

    Shapes: tensors of any shape; the values share their memory.
    """
    for name, tensor in tensors.items():
        boxes = boxes_of(tensor, cuts.get(name))
        for number, (offset, values) in enumerate(boxes):
            yield name, f"{name}[{number}]" if len(boxes) > 1 else name, offset, values


def entries(file: str, tensors: Mapping[str, Tensor], cuts: Mapping[str, Cut]) -> dict[str, Entry]:
    """Return the index entries of `tensors`, each with the slices that this rank writes to `file`.

    Shapes: tensors of any shape.
    """
    slices: dict[str, list[Slice]] = {name: [] for name in tensors}
    for name, own, offset, values in pieces(tensors, cuts):
        alias = None if own == name else own
        box = Slice(file=file, offset=offset, shape=tuple(values.shape), name=alias)
        slices[name].append(box)
    return {
        name: Entry(
            dtype=_dtype_name(tensor), shape=tuple(tensor.shape), slices=tuple(slices[name])
        )
        for name, tensor in tensors.items()
    }


def write(path: Path, parts: Mapping[str, Tensor]) -> None:
    """Write this rank's parts of tensors to one file.

    Tensors split in two in memory are joined. Other threads can run meanwhile.

    Shapes: parts of any shape.
    """
    save_file({name: part.contiguous().cpu() for name, part in parts.items()}, path)


def merge(parts: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Merge the indexes of all ranks."""
    merged: dict[str, Entry] = {}
    for part in parts:
        for name, entry in part.items():
            known = merged[name].slices if name in merged else ()
            merged[name] = entry.model_copy(update={"slices": known + entry.slices})
    return merged


def check_fits(
    targets: Mapping[str, Tensor], index: Mapping[str, Entry], *, prefix: str, source: Path
) -> None:
    """Check that the tensors stored under `prefix` match `targets` in name, shape and dtype.

    Shapes: targets of any shape.
    Raises: CheckpointError naming the first tensor that does not fit.
    """
    fix = "Resume with the model, the optimizer and the version of torch that wrote it."
    stored = {name for name in index if name.startswith(prefix)}
    for name in sorted(stored ^ set(targets)):
        which = "has no tensor" if name not in stored else "has a tensor that this run lacks,"
        raise CheckpointError(f"{source} {which} {name}.", fix=fix)
    for name, target in targets.items():
        entry = index[name]
        if (entry.shape, entry.dtype) != (tuple(target.shape), _dtype_name(target)):
            raise CheckpointError(
                f"{name} is {entry.dtype} {list(entry.shape)} in {source} and "
                f"{_dtype_name(target)} {list(target.shape)} in this run.",
                fix=fix,
            )


def fill(
    targets: Mapping[str, Tensor],
    index: Mapping[str, Entry],
    folder: Path,
    task: Task | None = None,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
) -> None:
    """Copy the stored values into this rank's parts of `targets`, in place.

    Only the slices that overlap them are read. `cuts` are those of `entries`.

    Shapes: targets of any shape, equal to the stored ones.
    Raises: CheckpointError when the slices of a tensor leave a part of it uncovered.
    """
    with ExitStack() as stack, torch.no_grad():
        files: dict[str, Any] = {}
        for name, target in targets.items():
            covered, wanted = 0, local_part(target).numel()
            boxes = boxes_of(target, cuts.get(name))
            for (start, part), piece in product(boxes, index[name].slices):
                box = _overlap(start, part.shape, piece)
                if box is None:
                    continue
                if piece.file not in files:
                    files[piece.file] = stack.enter_context(_opened(folder / piece.file))
                here, there = _box_at(start, box), _box_at(piece.offset, box)
                file, key = files[piece.file], piece.name or name
                values = file.get_slice(key)[there] if there else file.get_tensor(key)
                part[here].copy_(values)
                covered += values.numel()
            if covered != wanted:
                raise CheckpointError(
                    f"The slices of {name} in {folder} do not cover it.",
                    fix="Use a different checkpoint.",
                )
            if task:
                task.advance(wanted * target.element_size())


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except OSError as error:  # from safetensors, without the error number
        raise CheckpointError(f"Cannot read {path}: {error}.", fix=RESTORE) from error
    except RuntimeError as error:  # from torch, which opens the file too
        raise CheckpointError(f"Cannot read {path}: {error}.", fix=disk_fix(error)) from error


def empty(entry: Entry, device: torch.device | None = None) -> Tensor:
    """Return an unfilled tensor of an entry's dtype and shape, by default on the CPU.

    Shapes: the entry's.
    """
    return torch.empty(entry.shape, dtype=dtype_of(entry), device=device)


def dtype_of(entry: Entry) -> torch.dtype:
    """Return the torch dtype of an entry.

    Raises: CheckpointError when this torch has no such dtype.
    """
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"The checkpoint contains tensors of type {entry.dtype}, which this version of torch "
            "lacks.",
            fix="Install a newer torch.",
        )
    return dtype


def _copy_of(tensor: DTensor) -> tuple[int, int]:
    """Return which copy of its part of a DTensor this rank has, and how many copies there are."""
    copy, copies = 0, 1
    coordinates = tensor.device_mesh.get_coordinate() or [0] * tensor.device_mesh.ndim
    for size, coordinate, placement in zip(
        tensor.device_mesh.shape, coordinates, tensor.placements, strict=True
    ):
        if placement.is_replicate():
            copy, copies = copy * size + coordinate, copies * size
    return copy, copies


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _overlap(
    start: tuple[int, ...], shape: tuple[int, ...], piece: Slice
) -> list[tuple[int, int]] | None:
    """Return the bounds, per dimension, of the overlap of a box and a slice, or None."""
    box = [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(start, shape, piece.offset, piece.shape, strict=True)
    ]
    return box if all(low < high for low, high in box) else None


def _box_at(origin: tuple[int, ...], box: list[tuple[int, int]]) -> tuple[slice, ...]:
    """Return the index of a box in a part that starts at `origin` of the whole tensor."""
    return tuple(slice(low - o, high - o) for (low, high), o in zip(box, origin, strict=True))
