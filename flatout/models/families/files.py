"""The tensors of another tool's model: safetensors files, or files that torch.save wrote.

Nothing is executed: a file of torch.save is read with `weights_only=True`, which rejects pickled
code, and only its tensors and plain values are used.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flatout.errors import CheckpointError, ConfigError, in_shell
from flatout.storage.files import load_torch
from flatout.storage.json_io import JsonObject, read_json

SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Endings of files that torch.save wrote."""
INDEX = ".index.json"
"""The end of the name of a list of files, for a model in several parts."""
WEIGHTS = (
    "model.safetensors",
    f"model.safetensors{INDEX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX}",
    "ckpt.pt",
)
"""The names of a model's weights in the order in which transformers looks for them: the first is
read, whatever else there is. The last is nanoGPT's."""
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DDP and torch.compile insert into names."""
NESTED = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which training tools save the weights, beside other state."""
OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
"""The names under which the Trainer of transformers and accelerate save an optimizer."""
OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")
"""Keys under which training tools save it beside the weights, in one file."""
GET_AGAIN = "Get the file again from where it was published."


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a model by name, without the prefixes in WRAPPERS. Each is read when asked."""

    path: Path
    readers: dict[str, Callable[[], Tensor]]
    shapes: dict[str, tuple[int, ...]]
    others: JsonObject
    """The other values of a file of torch.save, such as nanoGPT's `model_args`."""

    def inside(self, prefix: str) -> TensorFiles:
        """Return the tensors whose names start with `prefix`, without it."""
        short = {name: name.removeprefix(prefix) for name in self.shapes}
        return replace(
            self,
            readers={short[name]: reader for name, reader in self.readers.items()},
            shapes={short[name]: shape for name, shape in self.shapes.items()},
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor, in at least fp32.

        Shapes: as in the file.
        Raises: CheckpointError when it has no floating-point numbers, or cannot be read.
        """
        try:
            tensor = self.readers[name]()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise _unreadable(self.path, error) from error
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise CheckpointError(
                f"{name} of {self.path} has the type {str(tensor.dtype).removeprefix('torch.')}: "
                "the weights are quantised.",
                fix="Start from the weights before quantisation.",
            )
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def open_tensors(path: Path) -> TensorFiles:
    """Open the weights of a directory or a file.

    Raises: CheckpointError when there are none, one file of several is missing, or a file is
            damaged or contains pickled code.
    """
    found = TensorFiles(path, {}, {}, {})
    for file in weight_files(path):
        try:
            if file.suffix == SAFETENSORS:
                opened: Any = safe_open(file, framework="pt")
                for stored in opened.keys():  # noqa: SIM118 - it is not a mapping
                    name = plain_name(stored)
                    found.readers[name] = partial(opened.get_tensor, stored)
                    found.shapes[name] = tuple(opened.get_slice(stored).get_shape())
            else:
                _open_torch(file, found)
        except (OSError, SafetensorError, RuntimeError, EOFError, ValueError, KeyError) as error:
            raise _unreadable(file, error) from error
    return found


def weight_files(path: Path) -> list[Path]:
    """Return the files with the weights of a model.

    Raises: CheckpointError when there are none, or one of several is missing.
    """
    if path.is_file():
        return [path]
    name = next((name for name in WEIGHTS if os.path.lexists(path / name)), None)
    if name is not None and not (path / name).exists():
        raise ConfigError(
            f"{path / name} is a link to {os.readlink(path / name)}, which does not exist.",
            fix="Download the model again, or delete the link to read its other weights.",
        )
    beside = [
        sorted(file for file in path.iterdir() if file.suffix in suffixes)
        for suffixes in ((SAFETENSORS,), TORCH)
    ]
    if name is None:
        only = next((found for found in beside if len(found) == 1), None)
        if only is not None:
            return only
        raise CheckpointError(
            f"{path} has no weights: there is neither {' nor '.join(WEIGHTS)}.{_named(beside)}",
            fix="Download the whole repository, or name the file with the weights.",
        )
    if not name.endswith(INDEX):
        return [path / name]
    document = read_json(path / name)
    listed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path / name} lists no files.", fix=GET_AGAIN)
    files = sorted({str(file) for file in listed.values()})
    for file in files:
        if Path(file).name != file or not (path / file).is_file():
            raise CheckpointError(
                f"{path} has no {file}, which {name} lists.{_named(beside)}",
                fix="Download the missing file, or correct the names that "
                f"{name} lists, if its tensors are in other files.",
            )
    return [path / file for file in files]


def _named(beside: list[list[Path]]) -> str:
    """Return the sentence that names the files that may hold weights, after a space."""
    names = [file.name for found in beside for file in found]
    return f" Its files are {', '.join(names)}." if names else ""


def optimizer_state(path: Path, others: JsonObject) -> Any:
    """Return the state of the optimizer of a model in a directory or a file, or None.

    `others` are the other values of the file with the weights.

    Raises: as `load_safely`.
    """
    files = filter(Path.is_file, (path / name for name in OPTIMIZER_FILES))
    found = (*map(others.get, OPTIMIZERS), *map(load_safely, files))
    every = (one[0] if isinstance(one, list) and len(one) == 1 else one for one in found if one)
    return next((one for one in every if not isinstance(one, str)), None)  # not its name


def load_safely(file: Path) -> Any:
    """Return what a file of torch.save contains.

    Raises: CheckpointError when it contains pickled code; errors of torch when it is damaged.
    """
    try:
        return load_torch(file)
    except pickle.UnpicklingError as error:
        safe = in_shell(file.with_suffix(SAFETENSORS).name)
        raise CheckpointError(
            f"{file} contains Python code or objects in a pickle. Reading them would execute code.",
            fix=f"If you trust the file, load it with the tool that wrote it, and save only the "
            f"tensors, with safetensors.torch.save_file, as {safe}.",
        ) from error


def _open_torch(file: Path, found: TensorFiles) -> None:
    """Add the tensors of a file of torch.save, and its other values."""
    document = load_safely(file)
    if not isinstance(document, Mapping):
        document = {}
    weights = next(
        (document[key] for key in NESTED if isinstance(document.get(key), Mapping)), document
    )
    tensors = {
        plain_name(str(name)): value for name, value in weights.items() if isinstance(value, Tensor)
    }
    if not tensors:
        raise CheckpointError(
            f"{file} contains no tensors by name.",
            fix="Save the model's state_dict, `torch.save(model.state_dict(), FILE)`.",
        )
    for name, tensor in tensors.items():
        found.readers[name] = partial(tensors.__getitem__, name)
        found.shapes[name] = tuple(tensor.shape)
    found.others.update(
        {str(key): value for key, value in document.items() if not isinstance(value, Tensor)}
    )


def plain_name(name: str) -> str:
    """Return a tensor's name without the prefixes in WRAPPERS."""
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name.replace("._orig_mod.", ".")


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return CheckpointError(f"Cannot read the weights of {path}: {reason[:200]}.", fix=GET_AGAIN)
