"""Chunks of torch.save: a directory of chunk_NNNNNN.pt files, or one .pt file.

No code in a file is run, and reading it takes memory bounded by its size.
"""

from __future__ import annotations

import itertools
import json
import math
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flatout.data.sources import FIRST_NAMED
from flatout.data.token_formats import Piece, Reading, TokenFormat, Tokens, tokens_field
from flatout.errors import DataError
from flatout.storage.files import Array
from flatout.storage.json_io import JsonObject
from flatout.storage.recognised import CHUNK_NAME, LEGACY_TORCH

METADATA = "metadata.json"
STATED = {
    "chunks": ("num_chunks", "total_chunks", "n_chunks"),
    "tokens": ("num_tokens", "total_tokens", "n_tokens"),
    "ids": ("vocab_size", "vocabulary_size"),
}
"""Counts that a metadata.json may state, and their keys. Other keys are not checked."""
PICKLE_BYTES = 1 << 20
"""Maximum size of the pickle that describes a tensor, which takes a few hundred bytes."""
LEGACY_PICKLES = 5
"""Number of pickles that precede the data in torch.save's format from before zip files."""
_ALLOWED = re.compile(
    r"torch\._utils _rebuild_(tensor|parameter)\w*|torch(\.storage)? \w+Storage"
    r"|torch \w*\d\w*|collections OrderedDict"
)
"""Names allowed in a tensor's pickle. Torch's own list includes some, such as bytearray, that can
allocate any amount of memory.
"""


def takes(path: Path) -> bool:
    """Return whether a path is a directory with chunks, or a file of torch.save."""
    if path.is_dir():
        return any(CHUNK_NAME.fullmatch(entry.name) for entry in path.iterdir())
    if path.suffix.lower() not in (".pt", ".pth", ".ckpt", ".bin") or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(len(LEGACY_TORCH))
    return path.suffix.lower() != ".bin" or head.startswith((b"PK\x03\x04", LEGACY_TORCH))


def files(path: Path) -> list[Path]:
    """Return the chunks in numerical order. Numbers start at 0 or 1.

    Raises: DataError when numbers are missing or duplicated.
    """
    if not path.is_dir():
        return [path]
    numbered = sorted(
        (int(match[1]), entry)
        for entry in path.iterdir()
        if (match := CHUNK_NAME.fullmatch(entry.name))
    )
    gaps = []
    before = min(numbered[0][0], 1) - 1
    for number, _ in numbered:
        if number == before:
            raise DataError(
                f"{path} has more than one chunk number {number}.",
                fix="Remove the one that does not belong there.",
            )
        if number > before + 1:
            gaps.append(f"{before + 1}" + f" to {number - 1}" * (number > before + 2))
        before = number
    if gaps:
        more = f" and {len(gaps) - FIRST_NAMED} more gaps" if len(gaps) > FIRST_NAMED else ""
        raise DataError(
            f"{path} has no chunk {', '.join(gaps[:FIRST_NAMED])}{more}.",
            fix="Copy the missing files there, or renumber the files.",
        )
    return [entry for _, entry in numbered]


def open_chunks(path: Path, reading: Reading) -> Tokens:
    """Open chunks. What a metadata.json beside them states must be correct.

    Raises: DataError.
    """
    chunks = files(path)
    metadata = _metadata(path / METADATA) if path.is_dir() else {}

    def check(what: str, found: int) -> None:
        """Check a count against the one that the metadata states. Ids may be padded there."""
        for key in STATED[what]:
            stated = metadata.get(key)
            if isinstance(stated, int) and stated != found and (what != "ids" or stated < found):
                there = f"The tokenizer has {found}" if what == "ids" else f"There are {found}"
                fix = f"Copy the missing chunks there, or correct {METADATA}."
                if what == "ids":
                    fix = "Name the tokenizer that made the chunks."
                raise DataError(f"{path / METADATA} has {key} {stated}. {there}.", fix=fix)

    check("chunks", len(chunks))
    check("ids", reading.vocab_size)

    def pieces() -> Iterator[Piece]:
        total = 0
        for chunk in chunks:
            tokens = read_chunk(chunk, reading)
            total += len(tokens)
            yield Piece(tokens, str(chunk))
        check("tokens", total)

    return Tokens(len(chunks), "chunks", pieces, metadata)


FORMAT = TokenFormat(takes=takes, files=files, open=open_chunks)


def _metadata(path: Path) -> JsonObject:
    """Return the metadata.json that the other pipeline wrote. Empty if there is none.

    Raises: DataError when it is not a JSON object.
    """

    def finite(text: str) -> float | str:  # JSON has neither infinity nor NaN
        return float(text) if math.isfinite(float(text)) else text

    fix = "Repair it, or move it away: the import does not need it."
    if not path.exists():
        return {}
    if not path.is_file():
        raise DataError(f"{path} is not a regular file.", fix=fix)
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=str, parse_float=finite)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}.", fix=fix) from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object.", fix=fix)
    return found


def read_chunk(path: Path, reading: Reading) -> Array:
    """Return the tokens of one chunk: a 1-D tensor of integers, or a dict with one.

    Shapes:  returns (T,), integers.
    Raises: DataError when the file cannot be read, contains anything else, or contains a tensor
            with more elements than the file stores.
    """
    import torch

    if not path.is_file():
        raise _error(f"{path} is not a regular file.")
    try:
        _check(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception as error:  # torch's unpickler raises errors of any kind for a damaged file
        text = str(error).strip().partition("\n")[0].rstrip(".")
        # torch's message about weights_only tells users how to run the file's code
        reason = "" if "weights_only" in str(error) else f": {text or type(error).__name__}"
        raise _error(f"{path} cannot be read as a tensor{reason}.") from error
    if isinstance(found, dict):
        of_tensors = {str(key): each for key, each in found.items() if torch.is_tensor(each)}
        if of_tensors:
            found = of_tensors[tokens_field(list(of_tensors), reading, path, "key")]
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
    what = ""
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        what = f"of {str(found.dtype).removeprefix('torch.')}, not of integers"
    elif found.dim() != 1:
        what = f"of shape {tuple(found.shape)}, not of one dimension"
    if what:
        raise DataError(
            f"{path} contains a tensor {what}.",
            fix="A chunk is one 1-D tensor of int64 or other integers: write it again with "
            "torch.save(tokens, path).",
        )
    tokens: Array = found.numpy()
    return tokens


def _error(what: str) -> DataError:
    fix = "Copy or write the chunk again. It must be one tensor saved with torch.save."
    return DataError(what, fix=fix)


def _check(path: Path) -> None:
    """Reject a file that could make torch use more memory or time than its size justifies."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            file.seek(0)
            _check_names(path, file, LEGACY_PICKLES)
            return
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if (
                any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
                or sum(entry.file_size for entry in entries) > path.stat().st_size
            ):
                raise _error(
                    f"{path} is compressed, or its entries overlap. torch.save writes neither."
                )
            for entry in entries:
                if entry.filename.endswith("data.pkl"):
                    if entry.file_size > PICKLE_BYTES:
                        raise _error(
                            f"{path} contains a pickle of {entry.file_size:,} bytes, too large "
                            "for one tensor's."
                        )
                    with archive.open(entry) as pickled:
                        _check_names(path, pickled, 1)


def _check_names(path: Path, file: IO[bytes], count: int) -> None:
    """Check the names of modules and functions in the next pickles of a file."""
    pickles = (pickletools.genops(file) for _ in range(count))
    for opcode, argument, _ in itertools.chain.from_iterable(pickles):
        if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST"):
            name = str(argument)
            if not _ALLOWED.fullmatch(name):
                raise _error(
                    f"{path} contains more than a tensor: it names {name.replace(' ', '.')}, and "
                    "code in a file is never run."
                )
