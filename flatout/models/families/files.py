"""The tensors of another tool's model: safetensors files, or files that torch.save wrote.

Nothing is executed: a file of torch.save is read with `weights_only=True`, which rejects pickled
code, and only its tensors and plain values are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flatout.errors import CheckpointError, ConfigError, in_shell
from flatout.storage.files import load_torch, unreadable
from flatout.storage.json_io import JsonObject, read_json
from flatout.storage.recognised import TORCH_FILE, recognise
from flatout.storage.streams import shortened

SAFETENSORS = ".safetensors"
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
NESTED = ("model", "state_dict", "model_state_dict", "module", "net")
"""Keys under which training tools save the weights, beside other state."""
OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
"""The names under which the Trainer of transformers and accelerate save an optimizer."""
STATE = ("optimizer", "scheduler", "scaler", "sampler", "rng_state", "training_args")
"""How the names of other files of theirs start, which have no weights."""
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

    def read(self, name: str) -> Tensor:
        """Return a tensor, in at least fp32.

        Shapes: as in the file.
        Raises: CheckpointError when it has no floating-point numbers, or cannot be read.
        """
        try:
            tensor = self.readers[name]()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise unreadable(self.path, error) from error
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
        except (OSError, SafetensorError, RuntimeError) as error:
            raise unreadable(file, error) from error
    if not found.shapes:
        keys = f": its keys are {shortened([*found.others])}" * bool(found.others)
        raise CheckpointError(
            f"{path} contains no tensors by name{keys}.",
            fix="Save the model's state_dict, `torch.save(model.state_dict(), FILE)`.",
        )
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
    beside = candidates(path)
    names = shortened([file.name for file in beside])
    if name is None:
        if len(beside) == 1:
            return beside
        what = f"no weights: there is neither {' nor '.join(WEIGHTS)}"
        fix = "Download the whole repository, or name the file with the weights."
        if beside:
            what = f"several files that may be its weights: {names}"
            fix = f"Name the one to start from: train.init_from={in_shell(beside[-1])}."
        raise CheckpointError(f"{path} has {what}.", fix=fix)
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
                f"{path} has no {file}, which {name} lists. Its files are {names}.",
                fix="Download the missing file, or correct the names that "
                f"{name} lists, if its tensors are in other files.",
            )
    return [path / file for file in files]


def candidates(folder: Path) -> list[Path]:
    """Return the files of a directory that may be its weights: of safetensors, or else others."""
    files = sorted(file for file in folder.iterdir() if not file.name.startswith(STATE))
    safe = [file for file in files if file.suffix == SAFETENSORS]
    return safe or [file for file in files if (k := recognise(file)) and k.name == TORCH_FILE]


def optimizer_state(path: Path, others: JsonObject) -> Any:
    """Return the state of the optimizer of a model in a directory or a file, or None.

    `others` are the other values of the file with the weights.

    Raises: as `load_torch`.
    """
    files = filter(Path.is_file, (path / name for name in OPTIMIZER_FILES))
    found = (*map(others.get, OPTIMIZERS), *map(load_torch, files))
    every = (one[0] if isinstance(one, list) and len(one) == 1 else one for one in found)
    return next((one for one in every if not isinstance(one, str | None)), None)  # not its name


def _open_torch(file: Path, found: TensorFiles) -> None:
    """Add the tensors of a file of torch.save, and its other values."""
    document = load_torch(file)
    document = document if isinstance(document, Mapping) else {}
    nested = (document[key] for key in NESTED if isinstance(document.get(key), Mapping))
    for stored, tensor in next(nested, document).items():
        if isinstance(tensor, Tensor):
            name = plain_name(str(stored))
            found.readers[name] = partial(Tensor.detach, tensor)
            found.shapes[name] = tuple(tensor.shape)
    others = {str(key): value for key, value in document.items() if not isinstance(value, Tensor)}
    found.others.update(others)


def plain_name(name: str) -> str:
    """Return a tensor's name without the prefixes in WRAPPERS."""
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name.replace("._orig_mod.", ".")
