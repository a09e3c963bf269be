"""Token files of other tools: .npy, llm.c's and nanoGPT's .bin, of torch.save and of datasets.

Nothing in a file is executed. Files are mapped, so they may be larger than memory.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from flatout.config.schema import flat
from flatout.config.words import metadata_rows
from flatout.data.sources.packed import import_package
from flatout.errors import DataError
from flatout.storage.files import Array, load_torch, require_checksums
from flatout.storage.json_io import JsonObject, read_object
from flatout.storage.recognised import (
    CHUNK_NAME,
    HEAD_BYTES,
    LEGACY_TORCH,
    LLM_C,
    NOT_TOKENS,
    is_text,
    prepare_it,
    recognise,
    start_from,
)
from flatout.storage.streams import shortened

FIELDS = ("input_ids", "tokens", "token_ids", "ids")
"""Usual names of the field that contains the tokens."""
TokenType = Literal["uint16", "uint32", "uint64", "int16", "int32", "int64", "uint8"]
"""Types that files without a header may contain."""
EXAMPLES = "train.bin, tokens.npy, chunk_000000.pt, data-00000-of-00001.arrow"
METADATA = "metadata.json"
"""What another tool recorded of its chunks, beside them."""
TOKENIZERS = ("tokenizer", "tokenizer_name", "tokenizer_path", "tokenizer_file")
"""Keys under which it may name the tokenizer."""
COPY = "Copy or write the file again."
KEYLESS = "Remove --field."
INTEGERS = "Name token ids of an integer type."
MOST_PADDING = 1024
"""Ids by which the vocabulary of a model may be larger than its tokenizer's."""
_SPLIT = re.compile(
    r"(?:^|[_.-])(train|training|val|valid|validation|dev|eval|evaluation|test)(?=[_.-]|$)"
)
_LLM_C_BYTES = 1024
"""The header of llm.c: the magic number, the version, the number of tokens, and zeros."""
_SAMPLED_WORDS = 4096
"""Words of 8 bytes that are read, at equal distances, to guess the type."""
_ENOUGH = 8
"""Tokens of a type that a sample must contain to prefer it to a narrower one."""
_GUESSES = ("uint64", "uint32", "uint16")


@dataclass(frozen=True)
class Reading:
    """How to read what a file does not state."""

    vocab_size: int
    """Number of ids. It decides between types that a file without a header may contain."""
    dtype: str | None = None
    """The type that the user states. Guessed for a file without a header when None."""
    dtype_beside: str | None = None
    """The type that metadata.json states of files without a header."""
    field: str | None = None
    """The key with the tokens in a file of torch.save: one of FIELDS, or the only one, when
    None."""


@dataclass(frozen=True)
class Found:
    """The token files of a path, in the order in which they are read."""

    train: tuple[Path, ...]
    val: tuple[Path, ...] = ()
    """Separate validation tokens. Without them, they are taken from the end."""
    left_out: tuple[str, ...] = ()
    """Test files, which are not read."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files to read."""
        return self.train + self.val


def kind_of(path: Path) -> str | None:
    """Return the format of a token file: numpy, torch, arrow, llm.c or raw. None for others."""
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".pt", ".pth", ".ckpt", ".arrow", ".bin") or not path.is_file():
        return None
    if suffix != ".bin":
        return {".npy": "numpy", ".arrow": "arrow"}.get(suffix, "torch")
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith((b"PK\x03\x04", LEGACY_TORCH)):
        return "torch"
    if head[:4] in LLM_C:
        return "llm.c"
    is_other = head.startswith(NOT_TOKENS) or is_text(head)
    beside = path.with_suffix(".idx"), path.parent / "manifest.json"
    return None if is_other or any(map(Path.exists, beside)) else "raw"


def find_tokens(path: Path, val: Path | None = None, *, is_raw: bool = False) -> Found:
    """Return the token files of a path: a file, or a directory of files or of directories.

    In a directory of several, `val`, `dev` or `eval` in a name marks validation tokens, and `test`
    is omitted. A file whose name shows no format has no header if it `is_raw`.

    Raises: DataError when there are none, a chunk is missing, or formats are mixed.
    """
    found = _found(path, is_raw=is_raw)
    if val is None:
        return found
    if found.val:
        raise DataError(
            f"{path} contains validation tokens, {found.val[0].name}, and --val names others.",
            fix="Remove --val, or name the training tokens alone.",
        )
    other = _found(val, is_raw=is_raw)
    if {file.resolve() for file in other.files} & {file.resolve() for file in found.files}:
        raise DataError(
            f"--val {val} is also training data: validating on it measures nothing.",
            fix="Name other tokens, or remove --val to use the last tenth.",
        )
    return Found(found.train, other.files, (*found.left_out, *other.left_out))


def _found(path: Path, *, is_raw: bool) -> Found:
    if kind_of(path) or (is_raw and path.is_file()):
        return Found((path,))
    if not path.is_dir():
        raise _unknown(path)
    if chunks := _chunks(path):
        return Found(chunks)
    by_split: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for entry in sorted(path.iterdir()):
        files = (entry,) if kind_of(entry) else _chunks(entry) if entry.is_dir() else ()
        match = _SPLIT.search(entry.name.lower())  # the first such word. Else it is training
        word = match[1] if match else "train"
        if entry.name[0] != ".":
            by_split["val" if word[0] in "vde" else word[:5]] += files
    examples = {str(kind_of(file)): file for files in by_split.values() for file in files}
    if not examples:
        raise _unknown(path)
    if len(examples) > 1:
        shown = " and ".join(f"{file.name} ({kind})" for kind, file in examples.items())
        raise DataError(
            f"{path} contains tokens in several formats: {shown}.", fix="Name one of the files."
        )
    train, val, test = (tuple(by_split[name]) for name in ("train", "val", "test"))
    if not train:
        raise DataError(
            f"{path} contains only tokens for {'validation' if val else 'tests'}.",
            fix="Name a file as training tokens, and another with --val.",
        )
    return Found(train, val, tuple(file.name for file in test))


def _chunks(folder: Path) -> tuple[Path, ...]:
    """Return the files chunk_NNNNNN.pt of a directory in order. Numbers start at 0 or 1.

    Or those of a dataset that `save_to_disk` of the package datasets wrote.

    Raises: DataError when numbers are missing or duplicated.
    """
    if files := sorted(folder.glob("data-*-of-*.arrow")):
        if (count := int(files[0].stem.rpartition("-")[2])) != len(files):
            raise DataError(f"{folder} has {len(files)} of {count} files.", fix=COPY)
        return tuple(files)
    matches = map(CHUNK_NAME.fullmatch, os.listdir(folder))
    numbered = sorted((int(match[1]), folder / match[0]) for match in matches if match)
    numbers = [number for number, _ in numbered]
    missing = sorted({*range(min(numbers[0], 1), numbers[-1])} - {*numbers}) if numbers else []
    twice = [number for number, after in pairwise(numbers) if number == after]
    if twice or missing:
        what = (
            f"more than one chunk number {twice[0]}" if twice else f"no chunk {shortened(missing)}"
        )
        raise DataError(
            f"{folder} has {what}.",
            fix="Copy missing files there, remove what does not belong there, or renumber them.",
        )
    return tuple(path for _, path in numbered)


def _unknown(path: Path) -> DataError:
    """Return the error for a path without tokens."""
    known = recognise(path)
    if known is not None:
        return DataError(known.instead_of("tokens that `flatout import` reads"), fix=known.fix)
    if not path.is_file():
        what = f"{path} has no token files" if path.exists() else f"There is no file {path}"
        return DataError(
            f"{what}.", fix=f"Name the directory or the file that contains them: {EXAMPLES}."
        )
    return DataError(
        f"{path} is not a token file of a known format.",
        fix=f"{prepare_it(path)} If it contains tokens without a header, name their type, such as "
        "--dtype uint16.",
    )


def read_metadata(folder: Path) -> JsonObject:
    """Return the metadata.json beside chunks, its dtype only if it is a TokenType.

    Raises: DataError when it is not a JSON object.
    """
    path, fix = folder / METADATA, "Repair it, or move it away: the import does not need it."
    stated = read_object(path, fix=fix) if path.exists() else {}
    dtype = str(stated.get("dtype")).rpartition(".")[2]
    return stated | {"dtype": dtype if dtype in get_args(TokenType) else None}


def check_metadata(path: Path, stated: JsonObject, found: JsonObject) -> None:
    """Check what a metadata.json states against the facts that were found.

    Raises: DataError.
    """
    stated = flat(stated)
    found |= {"padded ids": found["ids"] + MOST_PADDING, "one": 1}
    for row, key in ((each, key) for each in metadata_rows() for key in each["keys"].split()):
        fact, parts = found.get(row["fact"]), [*map(stated.get, key.split("*"))]
        if fact is None or not all(isinstance(part, type(fact)) for part in parts):
            continue
        value = reduce(operator.mul, parts)
        if isinstance(value, list):  # of names
            named = {Path(one).name for one in value if isinstance(one, str)}
            value, fact = sorted(named - {*fact}), sorted({*fact} - named) if named else []
        if isinstance(value, bool) or not getattr(operator, row["is"])(value, fact):
            raise DataError(
                f"{path} has {key} {json.dumps(value)}. {row['there'].format(fact)}",
                fix=row["fix"],
            )


def read_tokens(path: Path, reading: Reading) -> tuple[Array, str | None]:
    """Return the tokens of a file, mapped where possible, and a guess that users should know of.

    The rows of a two-dimensional array follow each other.

    Shapes:  returns (T,), integers.
    Raises: DataError when the file is damaged, needs a pickle, or does not contain integers.
    """
    kind = kind_of(path) or "raw"
    if reading.field and kind not in ("torch", "arrow"):
        _field((), reading, path, KEYLESS)
    array, note = _READERS[kind](path, reading), None
    require_tokens(array.dtype, array.shape, str(path))
    if reading.dtype not in (None, array.dtype.name):
        raise DataError(
            f"{path} contains {array.dtype.name}, but --dtype is {reading.dtype}.",
            fix="Remove --dtype: it is for files without a header.",
        )
    if not array.size:
        raise DataError(f"{path} contains no tokens.", fix=COPY)
    if array.ndim > 1:
        rows, columns = array.shape
        note = f"{path.name} has {rows:,} rows of {columns:,} tokens, which follow each other."
    if kind == "arrow":
        note = f"The rows of {path.name} follow each other."
    if kind == "raw" and not (reading.dtype or reading.dtype_beside):
        note = f"{path.name} is read as {array.dtype.name}. --dtype names a different type."
    return array.reshape(-1), note


def require_tokens(dtype: np.dtype[np.generic], shape: Sequence[int], where: str) -> None:
    """Check that an array is a row of integers, or several.

    Raises: DataError.
    """
    if dtype.kind not in "iu":
        raise DataError(f"{where} contains {dtype}, not integers.", fix=INTEGERS)
    if not 1 <= len(shape) <= 2:
        raise DataError(
            f"{where} has the shape {tuple(shape)}.",
            fix="Write the tokens one after the other: tokens.reshape(-1).",
        )


def _numpy(path: Path, _reading: Reading) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    except (ValueError, EOFError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as an array of integers: {error}.",
            fix="Save the tokens again: numpy.save(path, tokens). A pickle is never read.",
        ) from error


def _llm_c(path: Path, _reading: Reading) -> Array:
    with path.open("rb") as file:
        head = file.read(_LLM_C_BYTES)
    dtype = np.dtype(LLM_C[head[:4]]).newbyteorder("<")
    count, rest = divmod(path.stat().st_size - _LLM_C_BYTES, dtype.itemsize)
    stated = int.from_bytes(head[8:12], "little")
    if count != stated or rest or not count:
        raise DataError(
            f"{path} states {stated:,} tokens in its header, but contains {max(count, 0):,}.",
            fix=COPY,
        )
    return np.memmap(path, dtype, "r", offset=_LLM_C_BYTES)


def _torch(path: Path, reading: Reading) -> Array:
    import torch

    found = load_torch(path, DataError)
    require_checksums(path, DataError)
    if isinstance(found, dict) or reading.field:
        keyed = found if isinstance(found, dict) else {}
        tensors = {str(k): v for k, v in keyed.items() if torch.is_tensor(v)}
        names = [name for name, each in tensors.items() if not each.is_floating_point()]
        otherwise = start_from(path) if keyed else KEYLESS
        found = tensors[_field(names, reading, path, otherwise)]
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided or found.is_meta:
        raise DataError(
            f"{path} contains a {type(found).__name__}, not a dense tensor of integers.",
            fix="Write it again: one tensor of integers, saved with torch.save.",
        )
    kind = str(found.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):  # numpy lacks some of the others
        raise DataError(f"{path} contains {kind}, not integers.", fix=INTEGERS)
    tokens: Array = found.numpy()
    return tokens


def _arrow(path: Path, reading: Reading) -> Array:
    pyarrow = import_package("pyarrow", str(path), extra="parquet")
    try:
        ipc = import_package("pyarrow.ipc", str(path), extra="parquet")
        rows = ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Arrow: {error}.", fix=COPY) from error
    names = [field.name for field in rows.schema if "int" in str(field.type)]
    column = rows[_field(names, reading, path, prepare_it(path.parent, "*.arrow"))].combine_chunks()
    while "list" in str(column.type):
        column = column.flatten()
    tokens: Array = column.to_numpy(zero_copy_only=False)
    return tokens


def _field(names: Sequence[str], reading: Reading, path: Path, otherwise: str) -> str:
    """Return the key with the tokens. If there is none, `otherwise` says what to do with the file.

    Raises: DataError when the named one does not exist, or the choice is not clear.
    """
    only = names if len(names) == 1 else ()
    wanted = [reading.field] if reading.field else [*FIELDS, *only]
    found = next((name for name in wanted if name in names), None)
    if found is None:
        lacks = f"no key {reading.field!r}" if reading.field else f"{len(names)} keys of tokens"
        raise DataError(
            f"{path} has {lacks}, so it is not clear what contains the tokens.",
            fix=f"Name it with --field: {shortened([*map(repr, names)])}." if names else otherwise,
        )
    return found


def _raw(path: Path, reading: Reading) -> Array:
    fallback = "uint16" if reading.vocab_size <= 1 << 16 else "uint32"
    name = reading.dtype or reading.dtype_beside
    name = name or guess_dtype(_sample(path), reading.vocab_size) or fallback
    dtype = np.dtype(name).newbyteorder("<")
    size = path.stat().st_size
    if not size or size % dtype.itemsize:
        raise DataError(
            f"{path} has {size:,} bytes, which is not a whole number of {dtype.name} tokens.",
            fix="Copy the file again: it is probably truncated. If its tokens have a different "
            "type, name it: --dtype uint16, uint32 or uint64.",
        )
    return np.memmap(path, dtype, "r")


def guess_dtype(sample: bytes, vocab_size: int) -> str | None:
    """Return the widest unsigned type in which all tokens of a sample are in the vocabulary.

    A narrower type also fits, with zeros between the tokens. Signed and unsigned types store the
    same bytes. None when no type fits.
    """
    for name in _GUESSES:
        tokens = np.frombuffer(sample[: len(sample) // 8 * 8], f"<u{np.dtype(name).itemsize}")
        wide_enough = len(tokens) >= _ENOUGH or name == _GUESSES[-1]
        if wide_enough and len(tokens) and int(tokens.max()) < vocab_size:
            return name
    return None


def _sample(path: Path) -> bytes:
    """Return words of 8 bytes from all over a file."""
    count = path.stat().st_size // 8
    words = np.memmap(path, "<u8", "r", shape=count) if count else np.empty(0)
    return words[:: count // _SAMPLED_WORDS + 1].tobytes()


_READERS: dict[str, Callable[[Path, Reading], Array]] = {
    "numpy": _numpy,
    "llm.c": _llm_c,
    "torch": _torch,
    "arrow": _arrow,
    "raw": _raw,
}
