"""Find chunks: the `chunk_NNNNNN.pt` files of a directory, and the metadata beside them."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path

from flatout.errors import DataError
from flatout.json_io import JsonObject
from flatout.recognised import CHUNK_NAME, recognise
from flatout.sources import FIRST_NAMED

METADATA = "metadata.json"
STATED = {
    "chunks": ("num_chunks", "total_chunks", "n_chunks"),
    "tokens": ("num_tokens", "total_tokens", "n_tokens"),
    "ids": ("vocab_size", "vocabulary_size"),
}
"""Counts that a metadata.json may state, and their keys; other keys are not checked."""
_REPAIR = "Repair it, or move it away: the import does not need it."


def find_chunks(folder: Path) -> list[Path]:
    """Return the folder's chunks in numerical order; numbers start at 0 or 1.

    Raises: DataError when there are none, or when numbers are missing or duplicated.
    """
    is_folder = folder.is_dir()
    numbered = sorted(
        (int(match[1]), path)
        for path in (folder.iterdir() if is_folder else ())
        if (match := CHUNK_NAME.fullmatch(path.name))
    )
    if not numbered and (known := recognise(folder)) is not None:
        raise DataError(known.instead_of("a directory of chunks"), fix=known.fix)
    if not is_folder:
        raise DataError(
            f"{folder} is not a directory.",
            fix="Name the directory that contains the chunk_NNNNNN.pt files.",
        )
    if not numbered:
        raise DataError(
            f"{folder} has no chunk_NNNNNN.pt files.", fix="Name the directory that contains them."
        )
    numbers = [number for number, _ in numbered]
    duplicate = [number for number, times in Counter(numbers).items() if times > 1]
    if duplicate:
        raise DataError(
            f"{folder} has more than one chunk number {duplicate[0]}.",
            fix="Remove the one that does not belong there.",
        )
    if gaps := _gaps(numbers):
        more = f" and {len(gaps) - FIRST_NAMED} more gaps" if len(gaps) > FIRST_NAMED else ""
        raise DataError(
            f"{folder} has no chunk {', '.join(gaps[:FIRST_NAMED])}{more}.",
            fix="Copy the missing files there, or renumber the files.",
        )
    return [path for _, path in numbered]


def _gaps(numbers: list[int]) -> list[str]:
    """Return the missing numbers as `5` or `5 to 7`."""
    return [
        f"{before + 1}" if after == before + 2 else f"{before + 1} to {after - 1}"
        for before, after in itertools.pairwise([min(numbers[0], 1) - 1, *numbers])
        if after > before + 1
    ]


def read_metadata(folder: Path) -> JsonObject:
    """Return the folder's metadata.json, which the other pipeline wrote; empty if there is none.

    Raises: DataError when it is not a JSON object.
    """
    path = folder / METADATA
    if not path.exists():
        return {}
    if not path.is_file():
        raise DataError(
            f"{path} is not a regular file.", fix="Move it away: the import does not need it."
        )
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text, parse_constant=str, parse_float=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}.", fix=_REPAIR) from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object.", fix=_REPAIR)
    return found


def _finite(text: str) -> float | str:
    """Return the number, or its text if it is infinite: JSON has neither infinity nor NaN."""
    number = float(text)
    return number if math.isfinite(number) else text


def check_stated(metadata: JsonObject, folder: Path, what: str, found: int) -> None:
    """Check a count against the one that the metadata states.

    The stated vocabulary may be larger than the tokenizer's, padded with unused ids.

    Raises: DataError.
    """
    for key in STATED[what]:
        stated = metadata.get(key)
        if isinstance(stated, int) and stated != found and not (what == "ids" and stated > found):
            there = f"the tokenizer has {found}" if what == "ids" else f"there are {found}"
            fix = (
                "Name the tokenizer that made the chunks."
                if what == "ids"
                else f"Copy the missing chunks there, or correct {METADATA}."
            )
            raise DataError(f"{folder / METADATA} says {key} {stated}; {there}.", fix=fix)
