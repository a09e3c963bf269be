"""Recognises files and directories that are not text, and names the command that reads them."""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import UsageError, in_shell

CHUNK_NAME = re.compile(r"chunk_(\d+)\.pt")
"""Name of a token file that `flatout import` reads."""
_SHARD_NAME = re.compile(r"(train|val)-(\d+(\.mask)?|documents)\.bin")
"""Names of the files of a prepared dataset."""
HEAD_BYTES = 4096
"""Bytes of a file that are read to recognise it."""
MOST_ENTRIES = 1000
"""Files of a directory that are examined."""
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""Start of a file that torch.save wrote before it used zip: a pickled number."""
_LLM_C = {struct.pack("<i", 20240520): "uint16", struct.pack("<i", 20240801): "uint32"}
"""Start of an llm.c token file (GPT-2, Llama 3) and its dtype; the header has 1,024 bytes."""
ADDRESS_FIX = "Give a local path; a mounted store is one too."
TORCH_FILE = "a PyTorch file"
"""Name of a file that torch.save wrote."""
_GGUF = "flatout does not read GGUF. Start from the safetensors that the file was made from."
_TORCH_SUFFIXES = frozenset({".pt", ".pth", ".ckpt"})
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf"})
_LOOKED_INTO = _TORCH_SUFFIXES | _WEIGHT_SUFFIXES | {".bin", ".npy", ".npz"}
"""Suffixes of files that identify their directory."""


@dataclass(frozen=True)
class Recognised:
    """What a path is, and which command reads it."""

    path: Path
    name: str
    """With its article, to continue a sentence: `a NumPy array`."""
    fix: str
    """The command that reads it, or a statement that none does."""

    def instead_of(self, wanted: str) -> str:
        """Return the sentence `PATH is NAME, not WANTED.`"""
        return f"{self.path} is {self.name}, not {wanted}."


def require_local(
    path: Path | str, option: str = "", *, error: type[UsageError] = UsageError
) -> None:
    """Check that `path` is not a URL, which would become a directory called `s3:`.

    `option` is the option or key that gave it, as the message shows it.

    Raises: `error`, UsageError by default.
    """
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+:)/+", str(path))
    if match:
        slashes = "///" if match[1].lower() == "file:" else "//"  # a Path keeps only one of them
        url = str(path) if "//" in match[0] else f"{match[1]}{slashes}{str(path)[match.end() :]}"
        raise error(
            f"{option}{url} is a URL; only a local path can be used here.",
            fix=ADDRESS_FIX,
        )


def recognise(path: Path) -> Recognised | None:
    """Return what a file or directory is; None for text and for unknown or unreadable files."""
    try:
        if path.is_dir():
            return _folder(path)
        return _file(path) if path.is_file() else None
    except OSError:
        return None


class NotRegular(OSError):
    """A pipe, device or socket instead of a regular file."""


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor, without blocking on a named pipe.

    Raises: OSError; NotRegular for anything but a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotRegular(errno.EINVAL, "it is not a regular file", str(path))


def read_regular(path: Path, *, errors: str = "strict") -> str:
    """Return the text of a regular file.

    Raises: OSError; NotRegular for anything but a regular file; UnicodeDecodeError.
    """
    with open(open_regular(path), encoding="utf-8", errors=errors) as file:
        return file.read()


def _folder(path: Path) -> Recognised | None:
    shown = in_shell(path)
    if (path / "config.yaml").is_file() and (
        (path / "checkpoints").is_dir() or (path / "events.jsonl").is_file()
    ):
        return Recognised(
            path,
            "a run directory",
            f"Use it with `flatout generate {shown}`, or start from its weights: "
            f"train.init_from={shown}.",
        )
    if (path / "manifest.json").is_file() and (path / "index.json").is_file():
        return Recognised(
            path,
            "a checkpoint",
            f"Start from its weights, train.init_from={shown}, or resume from it, --resume "
            f"{shown}.",
        )
    if (path / "manifest.json").is_file() and (path / "tokenizer.json").is_file():
        return Recognised(path, "a prepared dataset", _train_on_it(path))
    files = list(_files_in(path))
    if any(CHUNK_NAME.fullmatch(file.name) for file in files):
        return Recognised(path, "a directory of token chunks", _import_it(path))
    if any(_SHARD_NAME.fullmatch(file.name) for file in files):
        return None  # an incomplete dataset
    if any(
        file.suffix.lower() not in _LOOKED_INTO
        for file in files
        if file.suffix.lower() not in (".json", ".pkl")
    ):
        return None
    telling = (recognise(file) for file in files if file.suffix.lower() in _LOOKED_INTO)
    first = next((found for found in telling if found), None)
    return first and Recognised(
        path, f"a directory with {first.path.name}, which is {first.name}", first.fix
    )


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the first MOST_ENTRIES files of a directory and all chunks, without hidden files."""
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if (
                (number < MOST_ENTRIES or CHUNK_NAME.fullmatch(entry.name))
                and not entry.name.startswith(".")
                and entry.is_file()
            ):
                yield folder / entry.name


def _file(path: Path) -> Recognised | None:
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    suffix = path.suffix.lower()
    if CHUNK_NAME.fullmatch(path.name):
        return Recognised(
            path,
            "a chunk of tokens",
            _import_it(path.absolute().parent if path.parent == Path() else path.parent),
        )
    if _SHARD_NAME.fullmatch(path.name) and (path.parent / "manifest.json").is_file():
        return Recognised(
            path, f"a file of the prepared dataset {path.parent}", _train_on_it(path.parent)
        )
    if head.startswith(b"\x93NUMPY"):
        return Recognised(
            path,
            "a NumPy array",
            _as_chunks(path, "numpy.load(sys.argv[1], mmap_mode='r').reshape(-1)"),
        )
    if head.startswith(b"PK\x03\x04"):
        return _archive(path)
    if head.startswith(_LEGACY_TORCH) or (suffix in _TORCH_SUFFIXES and b"\0" in head):
        return _torch_file(path)
    if all((path.parent / name).is_file() for name in ("manifest.json", "index.json")):
        return Recognised(
            path,
            f"a file of the checkpoint {path.parent}",
            f"Name the checkpoint: train.init_from={in_shell(path.parent)}.",
        )
    if head.startswith(b"GGUF"):
        return Recognised(path, "a file of model weights", _GGUF)
    if head[8:10] == b'{"' and suffix == ".safetensors":
        return Recognised(path, "a file of model weights", _start_from(path))
    if suffix == ".bin" and not _is_text(head):
        return Recognised(path, "a binary file", _binary_tokens(path, head))
    return None


def _archive(path: Path) -> Recognised | None:
    """Return what a zip file is; torch and NumPy both write them."""
    import zipfile  # and five compressors, which `flatout --help` does not need

    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return _torch_file(path) if path.suffix.lower() in _TORCH_SUFFIXES else None
    if any(name.endswith("/data.pkl") for name in names):
        return _torch_file(path)
    arrays = {
        name.removesuffix(".npy"): index
        for index, name in enumerate(names)
        if name.endswith(".npy")
    }
    if arrays:
        shown = ", ".join(
            name if name.isidentifier() else repr(name[:40]) for name in list(arrays)[:3]
        )
        number = next(iter(arrays.values()))  # a name could contain code
        first = f"numpy.load(sys.argv[1])[numpy.load(sys.argv[1]).files[{number}]]"
        return Recognised(
            path, f"a NumPy archive of {shown}", _as_chunks(path, f"{first}.reshape(-1)")
        )
    return None


def _binary_tokens(path: Path, head: bytes) -> str:
    """Return how to convert a .bin file to chunks; only llm.c's header states the token dtype."""
    if dtype := _LLM_C.get(head[:4]):
        return _as_chunks(
            path, f"numpy.memmap(sys.argv[1], '{dtype}', 'r', offset=1024)", "in llm.c's format"
        )
    way = _as_chunks(path, "numpy.memmap(sys.argv[1], 'uint16', 'r')", "in nanoGPT's format")
    return (
        f"{way} The command assumes uint16; if the tokenizer has more than 65,536 tokens, replace "
        f"'uint16' with 'uint32' in it."
    )


def _torch_file(path: Path) -> Recognised:
    into = f"`flatout import FOLDER --out {_dataset(path.stem)} --tokenizer FILE`"
    return Recognised(
        path,
        TORCH_FILE,
        f"{_start_from(path)} If it contains tokens, name it chunk_000000.pt, in its own "
        f"directory, and run {into}.",
    )


def _start_from(path: Path) -> str:
    """Return how to use a file of weights; a config.json beside it means the whole directory."""
    model = path.parent if (path.parent / "config.json").is_file() else path
    return f"If it contains weights, start a run from them: train.init_from={in_shell(model)}."


def _dataset(name: str) -> str:
    """Return the path of the dataset made from `name`, quoted for a command."""
    return in_shell(f"data/{name}")


def _train_on_it(folder: Path) -> str:
    return f"Train on it: `flatout train RECIPE data.path={in_shell(folder)}`."


def _import_it(folder: Path) -> str:
    out = _dataset(folder.absolute().name)
    return (
        f"Import it: `flatout import {in_shell(folder)} --out {out} --tokenizer FILE`, where FILE "
        f"is the tokenizer that made the tokens."
    )


def _as_chunks(path: Path, tokens: str, kind: str = "") -> str:
    """Return the command that writes the tokens of a Python expression as chunks, in pieces."""
    parts = f"enumerate(numpy.array_split({tokens}, 64))"
    save = (
        f"[torch.save(torch.from_numpy(part.astype('int64')), f'chunks/chunk_{{n:06d}}.pt') for n, "
        f"part in {parts}]"
    )
    command = f'mkdir chunks && python -c "import numpy, sys, torch; {save}" {in_shell(path)}'
    into = f"`flatout import chunks --out {_dataset(path.stem)} --tokenizer FILE`"
    return (
        f"flatout cannot read it directly. If it contains tokens{kind and f' {kind}'}, write them "
        f"as chunks, `{command}`, and run {into}."
    )


def _is_text(head: bytes) -> bool:
    """Return whether bytes are UTF-8 without zero bytes, except for a character cut at the end."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4 and b"\0" not in head
    return b"\0" not in head
