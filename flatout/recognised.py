"""What a path of this machine holds when it is no text: what other programs and flatout itself
write, and the command that takes it. No torch.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import UsageError, in_shell

CHUNK_NAME = re.compile(r"chunk_(\d+)\.pt")
"""The name of a file of tokens that `flatout import` reads."""
_SHARD_NAME = re.compile(r"(train|val)-(\d+(\.mask)?|documents)\.bin")
"""The names of the files of a prepared dataset."""
HEAD_BYTES = 4096
"""So much of a file is read to tell what it is."""
MOST_ENTRIES = 1000
"""Of a folder, so many files are looked at."""
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What torch.save began a file with before it wrote zip files: a pickled number."""
_LLM_C = {struct.pack("<i", 20240520): "uint16", struct.pack("<i", 20240801): "uint32"}
"""What a token file of llm.c begins with, for GPT-2 and for Llama 3, and the type of its tokens;
the header is 256 numbers of four bytes.
"""
ADDRESS_FIX = "Name a path of this machine; it may lie where the store is mounted."
_WEIGHTS = "flatout cannot load weights that other programs saved: train.init_from takes a run or a checkpoint that `flatout train` wrote."
_TORCH_SUFFIXES = frozenset({".pt", ".pth", ".ckpt"})
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf"})
_LOOKED_INTO = _TORCH_SUFFIXES | _WEIGHT_SUFFIXES | {".bin", ".npy", ".npz"}
"""Endings of the files that say what their folder is."""


@dataclass(frozen=True)
class Recognised:
    """What a path is, and what can be done with it."""

    path: Path
    name: str
    """With its article, as a sentence goes on: `a NumPy array`."""
    fix: str
    """The command that takes it, or that nothing does."""

    def instead_of(self, wanted: str) -> str:
        """Return the sentence that it is not what was wanted."""
        return f"{self.path} is {self.name}, not {wanted}."


def require_local(
    place: Path | str, option: str = "", *, error: type[UsageError] = UsageError
) -> None:
    """Refuse an address where a path of this machine is needed: it would become a folder called
    `s3:`. `option` is what the place was given as.

    Raises: UsageError, or the kind of it that is stated.
    """
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+:)/+", str(place))
    if match:
        slashes = (
            "///" if match[1].lower() == "file:" else "//"
        )  # a Path has one that is left of them
        address = (
            str(place) if "//" in match[0] else f"{match[1]}{slashes}{str(place)[match.end() :]}"
        )
        raise error(
            f"{option}{address} is an address; only a path of this machine can be used here.",
            fix=ADDRESS_FIX,
        )


def recognise(path: Path) -> Recognised | None:
    """Return what a file or folder is; None for text, for what is not known, and where nothing is
    or may be read.
    """
    try:
        if path.is_dir():
            return _folder(path)
        return _file(path) if path.is_file() else None
    except OSError:
        return None


class NotRegular(OSError):
    """A pipe, a device or a socket where a file should be."""


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor; a named pipe is refused, not
    waited for.

    Raises: OSError, also for what is not a regular file.
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

    Raises: OSError, also for what is not a regular file; UnicodeDecodeError.
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
            f"Use it with `flatout generate {shown}`, or begin with its weights: train.init_from={shown}.",
        )
    if (path / "manifest.json").is_file() and (path / "index.json").is_file():
        return Recognised(
            path,
            "a checkpoint",
            f"Begin with its weights, train.init_from={shown}, or go on from it, --resume {shown}.",
        )
    if (path / "manifest.json").is_file() and (path / "tokenizer.json").is_file():
        return Recognised(path, "a prepared dataset", _train_on_it(path))
    files = list(_files_in(path))
    if any(CHUNK_NAME.fullmatch(file.name) for file in files):
        return Recognised(path, "a folder of token chunks", _import_it(path))
    if any(_SHARD_NAME.fullmatch(file.name) for file in files):
        return None  # a prepared dataset that is not whole
    if any(
        file.suffix.lower() not in _LOOKED_INTO
        for file in files
        if file.suffix.lower() not in (".json", ".pkl")
    ):
        return None
    telling = (recognise(file) for file in files if file.suffix.lower() in _LOOKED_INTO)
    first = next((found for found in telling if found), None)
    return first and Recognised(
        path, f"a folder with {first.path.name}, which is {first.name}", first.fix
    )


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the first files of a folder that are not hidden, those called as chunks whatever their
    number.
    """
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
    if head.startswith(b"GGUF") or (head[8:10] == b'{"' and suffix == ".safetensors"):
        return Recognised(path, "a file of model weights", _WEIGHTS)
    if suffix == ".bin" and not _is_text(head):
        return Recognised(path, "a binary file", _binary_tokens(path, head))
    return None


def _archive(path: Path) -> Recognised | None:
    """Return what a zip file is: torch and numpy both write them."""
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
        first = f"numpy.load(sys.argv[1])[numpy.load(sys.argv[1]).files[{next(iter(arrays.values()))}]]"  # by number: a name can be any code
        return Recognised(
            path, f"a NumPy archive of {shown}", _as_chunks(path, f"{first}.reshape(-1)")
        )
    return None


def _binary_tokens(path: Path, head: bytes) -> str:
    """Return how a .bin file becomes chunks; only llm.c's have a header that tells the type of the
    tokens.
    """
    if dtype := _LLM_C.get(head[:4]):
        return _as_chunks(
            path, f"numpy.memmap(sys.argv[1], '{dtype}', 'r', offset=1024)", "in llm.c's format"
        )
    way = _as_chunks(path, "numpy.memmap(sys.argv[1], 'uint16', 'r')", "in nanoGPT's format")
    return f"{way} The command assumes uint16; if the tokenizer has more than 65,536 tokens, replace 'uint16' with 'uint32' in it."


def _torch_file(path: Path) -> Recognised:
    into = f"`flatout import FOLDER --out {_dataset(path.stem)} --tokenizer FILE`"
    return Recognised(
        path,
        "a PyTorch file",
        f"{_WEIGHTS} If it holds tokens, name it chunk_000000.pt, in a folder of its own, and run {into}.",
    )


def _dataset(name: str) -> str:
    """Return the place of the dataset that a file or folder becomes, as a word of a command."""
    return in_shell(f"data/{name}")


def _train_on_it(folder: Path) -> str:
    return f"Train on it: `flatout train RECIPE data.path={in_shell(folder)}`."


def _import_it(folder: Path) -> str:
    out = _dataset(folder.absolute().name)
    return f"Import it: `flatout import {in_shell(folder)} --out {out} --tokenizer FILE`, where FILE is the tokenizer that made the tokens."


def _as_chunks(path: Path, tokens: str, kind: str = "") -> str:
    """Return how tokens that are read by an expression become chunks, in pieces, because they may
    be larger than memory.
    """
    parts = f"enumerate(numpy.array_split({tokens}, 64))"
    save = f"[torch.save(torch.from_numpy(part.astype('int64')), f'chunks/chunk_{{n:06d}}.pt') for n, part in {parts}]"
    command = f'mkdir chunks && python -c "import numpy, sys, torch; {save}" {in_shell(path)}'
    into = f"`flatout import chunks --out {_dataset(path.stem)} --tokenizer FILE`"
    return f"flatout cannot read it as it is. If it holds tokens{kind and f' {kind}'}, write them as chunks, `{command}`, and run {into}."


def _is_text(head: bytes) -> bool:
    """Return whether bytes are UTF-8, but for a character that the end cuts, and hold no zeros."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4 and b"\0" not in head
    return b"\0" not in head
