"""The tensor in a file that torch.save wrote, in memory bounded by the file's size, whatever the
file says of itself.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flatout.errors import DataError

if TYPE_CHECKING:
    import torch

PICKLE_BYTES = 1 << 20
"""The pickle that describes a tensor takes a few hundred bytes."""
LEGACY_PICKLES = 5
"""Before zip files, torch.save wrote so many pickles, one after the other, and then the numbers."""
_CALLED = re.compile(
    r"torch\._utils _rebuild_(tensor|parameter)\w*|torch(\.storage)? \w+Storage|torch \w*\d\w*|collections OrderedDict"
)
"""What a tensor's pickle names; torch's own list also has what allocates memory of any size, such
as bytearray.
"""
_WRITE_AGAIN = "Copy or write the chunk again; it has to be one tensor saved with torch.save."


def load_tensor(path: Path) -> torch.Tensor:
    """Return the tensor in a file of torch.save; no code in the file is run.

    Shapes:  returns what was saved, any shape.
    Raises: DataError when the file cannot be read, holds something else, or a tensor with more
            elements than the file.
    """
    import torch

    if not path.is_file():
        raise DataError(f"{path} is not a regular file.", fix=_WRITE_AGAIN)
    try:
        _check(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception as error:  # damage reaches torch's unpickler, whose errors are of any kind; its words say how to run what is in the file
        reason = (
            ""
            if "weights_only" in str(error)
            else f": {str(error).strip().partition(chr(10))[0].rstrip('.') or type(error).__name__}"
        )
        raise DataError(f"{path} cannot be read as a tensor{reason}.", fix=_WRITE_AGAIN) from error
    if not isinstance(found, torch.Tensor):
        raise DataError(f"{path} holds a {type(found).__name__}, not a tensor.", fix=_WRITE_AGAIN)
    if found.layout is not torch.strided or found.device.type != "cpu":
        raise DataError(
            f"{path} holds a tensor without numbers of its own.",
            fix="Save tokens.to_dense().cpu().",
        )
    if found.numel() * found.element_size() > found.untyped_storage().nbytes():
        raise DataError(
            f"{path} holds an expanded tensor: {found.numel():,} elements in {found.untyped_storage().nbytes():,} bytes.",
            fix="Save tokens.clone(), which holds every element.",
        )
    return found


def _check(path: Path) -> None:
    """Refuse a file that could make torch take more memory or time than the file has bytes."""
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
                raise DataError(
                    f"{path} is compressed, or its entries overlap; torch.save writes neither.",
                    fix=_WRITE_AGAIN,
                )
            for entry in entries:
                if entry.filename.endswith("data.pkl"):
                    if entry.file_size > PICKLE_BYTES:
                        raise DataError(
                            f"{path} holds a pickle of {entry.file_size:,} bytes, which is not one tensor's.",
                            fix=_WRITE_AGAIN,
                        )
                    with archive.open(entry) as pickled:
                        _check_names(path, _names(pickled))


def _names(file: IO[bytes]) -> Iterator[str]:
    """Yield what the next pickle of a file names, `MODULE NAME`."""
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST"):
            yield str(argument)


def _check_names(path: Path, names: Iterator[Any]) -> None:
    wrong = next((name for name in names if not _CALLED.fullmatch(name)), None)
    if wrong is not None:
        shown = wrong.replace(" ", ".")
        raise DataError(
            f"{path} holds more than a tensor: it names {shown}, and code in a file is never run.",
            fix=_WRITE_AGAIN,
        )
