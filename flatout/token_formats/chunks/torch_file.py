"""Load the tensor in a torch.save file, or in a dict in it, in memory bounded by its size."""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from flatout.errors import DataError
from flatout.files import Array
from flatout.token_formats import Reading, tokens_field

if TYPE_CHECKING:
    import torch

PICKLE_BYTES = 1 << 20
"""Maximum size of the pickle that describes a tensor, which takes a few hundred bytes."""
LEGACY_PICKLES = 5
"""Number of pickles that precede the data in torch.save's format from before zip files."""
_ALLOWED = re.compile(
    r"torch\._utils _rebuild_(tensor|parameter)\w*|torch(\.storage)? \w+Storage"
    r"|torch \w*\d\w*|collections OrderedDict"
)
"""Names allowed in a tensor's pickle; torch's own list includes some, such as bytearray, that can
allocate any amount of memory.
"""


def load_tokens(path: Path, reading: Reading) -> Array:
    """Return the tokens in a file of torch.save: a tensor, or a dict of tensors with a usual key.

    Shapes:  returns (T,), integers.
    Raises: DataError as load_tensor, and when the tensor is not a row of integers.
    """
    found = load_tensor(path, reading)
    fix = (
        "A chunk is one 1-D tensor of int64 or other integers: write it again with "
        "torch.save(tokens, path)."
    )
    dtype = str(found.dtype).removeprefix("torch.")
    if found.is_floating_point() or found.is_complex() or dtype == "bool":
        raise DataError(f"{path} contains a tensor of {dtype}, not of integers.", fix=fix)
    if found.dim() != 1:
        raise DataError(
            f"{path} contains a tensor of shape {tuple(found.shape)}, not of one dimension.",
            fix=fix,
        )
    tokens: Array = found.numpy()
    return tokens


def load_tensor(path: Path, reading: Reading | None = None) -> torch.Tensor:
    """Return the tensor in a file of torch.save, without running any code in the file.

    With `reading`, the file may also contain a dict of tensors.

    Shapes:  returns what was saved, any shape.
    Raises: DataError when the file cannot be read, contains anything but a tensor, or contains a
            tensor with more elements than the file stores.
    """
    import torch

    found = _load(path)
    if isinstance(found, dict) and reading is not None:
        tensors = {
            str(key): value for key, value in found.items() if isinstance(value, torch.Tensor)
        }
        if tensors:
            found = tensors[tokens_field(list(tensors), reading, path, "key")]
    if not isinstance(found, torch.Tensor):
        raise _error(f"{path} contains a {type(found).__name__}, not a tensor.")
    if found.layout is not torch.strided or found.device.type != "cpu":
        raise DataError(
            f"{path} contains a tensor that is not a dense CPU tensor.",
            fix="Save tokens.to_dense().cpu().",
        )
    num_bytes = found.untyped_storage().nbytes()
    if found.numel() * found.element_size() > num_bytes:
        raise DataError(
            f"{path} contains an expanded tensor: {found.numel():,} elements in {num_bytes:,} "
            "bytes.",
            fix="Save tokens.clone(), which stores every element.",
        )
    return found


def _load(path: Path) -> object:
    """Return what a file contains.

    Raises: DataError when it cannot be read, or names anything but tensors.
    """
    import torch

    if not path.is_file():
        raise _error(f"{path} is not a regular file.")
    try:
        _check(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception as error:  # torch's unpickler raises errors of any kind for a damaged file
        text = str(error).strip().partition("\n")[0].rstrip(".")
        # torch's message about weights_only tells users how to run the file's code
        reason = "" if "weights_only" in str(error) else f": {text or type(error).__name__}"
        raise _error(f"{path} cannot be read as a tensor{reason}.") from error


def _error(what: str) -> DataError:
    fix = "Copy or write the chunk again; it must be one tensor saved with torch.save."
    return DataError(what, fix=fix)


def _check(path: Path) -> None:
    """Refuse a file that could make torch use more memory or time than its size justifies."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            file.seek(0)
            _check_names(path, (name for _ in range(LEGACY_PICKLES) for name in _names(file)))
            return
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if (
                any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
                or sum(entry.file_size for entry in entries) > path.stat().st_size
            ):
                raise _error(
                    f"{path} is compressed, or its entries overlap; torch.save writes neither."
                )
            for entry in entries:
                if entry.filename.endswith("data.pkl"):
                    if entry.file_size > PICKLE_BYTES:
                        raise _error(
                            f"{path} contains a pickle of {entry.file_size:,} bytes, too large "
                            "for one tensor's."
                        )
                    with archive.open(entry) as pickled:
                        _check_names(path, _names(pickled))


def _names(file: IO[bytes]) -> Iterator[str]:
    """Yield the names in the next pickle of a file, as `MODULE NAME`."""
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST"):
            yield str(argument)


def _check_names(path: Path, names: Iterator[str]) -> None:
    wrong = next((name for name in names if not _ALLOWED.fullmatch(name)), None)
    if wrong is not None:
        raise _error(
            f"{path} contains more than a tensor: it names {wrong.replace(' ', '.')}, and code in "
            "a file is never run."
        )
