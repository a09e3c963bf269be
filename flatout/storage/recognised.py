"""Recognises files and directories that are not text, and names the command that reads them."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from flatout.errors import ConfigError, UsageError, in_shell

CHUNK_NAME = re.compile(r"chunk_(\d+)\.pt")
"""Name of a token file that `flatout import` reads."""
SAVED_NAME = re.compile(r"checkpoint[-_](\d+)")
"""Name of a directory that the Trainer of transformers and accelerate save."""
HEAD_BYTES = 4096
"""Bytes of a file that are read to recognise it."""
MOST_ENTRIES = 1000
"""Files of a directory that are examined."""
LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""Start of a file that torch.save wrote before it used zip: a pickled number."""
LLM_C = {struct.pack("<i", 20240520): "uint16", struct.pack("<i", 20240801): "uint32"}
"""Start of an llm.c token file (GPT-2, Llama 3) and its dtype. The header has 1,024 bytes."""
NOT_TOKENS = (
    b"PK\x03\x04",
    LEGACY_TORCH,
    b"GGUF",
    b"\x7fELF",
    b"\x1f\x8b",
    b"%PDF",
    b"\x89PNG",
    b"MZ",
)
"""How binary files of other kinds start."""
_BY_HAND = (
    "Read its tokens in Python with the package that wrote it, and write them with "
    "`flatout.write_dataset`: docs/data.md has the lines."
)
_MEGATRON = (b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00")
"""Start of an index of Megatron."""
ADDRESS_FIX = (
    "Give a local path: `flatout pull URL DIR` fetches a directory from a store, and `flatout push "
    "DIR URL` sends one."
)
IF_TOKENS = "If it contains tokens, import it"
TORCH_FILE = "a PyTorch file"
"""Name of a file that torch.save wrote."""
_GGUF = "flatout does not read GGUF. Start from the safetensors that the file was made from."
ADAPTER, LITGPT = "a PEFT adapter", "a checkpoint of litgpt"
"""Names of models that have to be converted before flatout reads them."""
_TO_CONVERT = {
    "adapter_config.json": (
        ADAPTER,
        "Merge it into its base model with PEFT, `PeftModel.from_pretrained(base, {0!r})"
        ".merge_and_unload().save_pretrained('merged')`, then give merged in its place.",
    ),
    "lit_model.pth": (
        LITGPT,
        "Convert it, `litgpt convert_from_litgpt {1} converted`, copy its config.json to "
        "converted, then give converted in its place.",
    ),
}
"""The file that identifies each, its name, and the steps."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Names of the weights of a model, which a config.json beside them describes."""
_TORCH_SUFFIXES = frozenset({".pt", ".pth", ".ckpt"})
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf"})
_LOOKED_INTO = _TORCH_SUFFIXES | _WEIGHT_SUFFIXES | {".bin", ".idx", ".npy", ".npz"}
"""Suffixes of files that identify their directory."""
_BESIDE = frozenset({".json", ".pkl", ".md"})
"""Suffixes of files next to those."""


_TRAIN_ON_IT = "Train on it: `flatout train RECIPE data.path={}`."
_WHOLE = {
    "run": (
        "a run directory",
        "Use it with `flatout generate {0}`, or start from its weights: train.init_from={0}.",
    ),
    "checkpoint": (
        "a checkpoint",
        "Start from its weights, train.init_from={0}, or resume from it, --resume {0}.",
    ),
    "export": (
        "an export",
        "Start a run from its weights: train.init_from={0}. Or score one for transformers on "
        "tasks: `lm_eval --model hf --model_args pretrained={0} --tasks hellaswag`.",
    ),
    "dataset": ("a prepared dataset", _TRAIN_ON_IT),
}
"""The name of each directory of flatout, and what to do with it."""
Found: TypeAlias = tuple[str, str]
"""The name and the fix of a `Recognised`."""


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
            f"{option}{url} is a URL. Only a local path can be used here.",
            fix=ADDRESS_FIX,
        )


def require_recipe_path(path: Path | str, option: str = "") -> None:
    """Check that `path` can become a recipe: a local path that ends in .yaml or .yml.

    `option` is the option or key that gave it, as the message shows it.

    Raises: UsageError for a URL; ConfigError for a different ending.
    """
    require_local(path, option)
    if Path(path).suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"{option}{path} is not a YAML file.", fix=f"For example {option}recipe.yaml."
        )


def recognise(path: Path) -> Recognised | None:
    """Return what a file or directory is. None for text and for unknown or unreadable files."""
    try:
        found = _folder(path) if path.is_dir() else _file(path) if path.is_file() else None
    except OSError:
        return None
    return None if found is None else Recognised(path, *found)


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


def read_regular(path: Path) -> str:
    """Return the text of a regular file.

    Raises: OSError; NotRegular for anything but a regular file; UnicodeDecodeError.
    """
    with open(open_regular(path), encoding="utf-8") as file:
        return file.read()


def kind_of(folder: Path) -> str | None:
    """Return what a directory of flatout is: run, or what its manifest.json says: dataset,
    checkpoint, export.

    None for any other directory.
    """
    if _has(folder, "config.yaml") and (
        (folder / "checkpoints").is_dir() or _has(folder, "events.jsonl")
    ):
        return "run"
    try:
        kind = json.loads(read_regular(folder / "manifest.json"))["kind"]
    except (OSError, ValueError, RecursionError, TypeError, LookupError):
        return None
    return kind if isinstance(kind, str) and kind in _WHOLE else None


def _has(folder: Path, *names: str) -> bool:
    """Return whether a directory has files of all these names."""
    return all((folder / name).is_file() for name in names)


def _to_convert(folder: Path) -> Found | None:
    for file, (name, steps) in _TO_CONVERT.items():
        if _has(folder, file):
            return name, steps.format(str(folder), in_shell(folder))
    return None


def _folder(path: Path) -> Found | None:
    if kind := kind_of(path):
        name, fix = _WHOLE[kind]
        return name, fix.format(in_shell(path))
    if (found := _to_convert(path)) is not None:
        return found
    with os.scandir(path) as entries:
        there = [one for one in islice(entries, MOST_ENTRIES) if not one.name.startswith(".")]
    files = [path / entry.name for entry in there if entry.is_file()]
    if any(CHUNK_NAME.fullmatch(file.name) for file in files):
        return "a directory of token chunks", import_it(path)
    saved = [(int(match[1]), match[0]) for e in there if (match := SAVED_NAME.fullmatch(e.name))]
    if saved:
        newest = in_shell(path / max(saved)[1])
        fix = f"Start a run from the newest: train.init_from={newest}."
        return "a directory with checkpoints of another tool", fix
    if any(file.name.endswith(".ends.bin") for file in files):
        return None  # an incomplete dataset
    suffixes = {file: file.suffix.lower() for file in files}
    if not {*suffixes.values()} <= _LOOKED_INTO | _BESIDE:
        is_model = any(_has(path, name) or _has(path, f"{name}.index.json") for name in _WEIGHTS)
        return ("a model of another tool", start_from(path)) if is_model else None
    telling = (recognise(file) for file, suffix in suffixes.items() if suffix in _LOOKED_INTO)
    first = next(filter(None, telling), None)
    if first is None:
        return None
    return f"a directory with {first.path.name}, which is {first.name}", first.fix


def _file(path: Path) -> Found | None:
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    suffix, folder = path.suffix.lower(), path.parent
    if not head and suffix in _TORCH_SUFFIXES | _WEIGHT_SUFFIXES:
        return "an empty file", "Copy or write it again."
    if suffix in _TORCH_SUFFIXES | _WEIGHT_SUFFIXES and (found := _to_convert(folder)):
        return found
    if CHUNK_NAME.fullmatch(path.name):
        return "a chunk of tokens", import_it(folder)
    kind = kind_of(folder)
    if kind == "dataset" and suffix == ".bin":
        return f"a file of the prepared dataset {folder}", _TRAIN_ON_IT.format(in_shell(folder))
    if suffix == ".npz":
        return "a NumPy archive", _BY_HAND
    is_zip = head.startswith(b"PK\x03\x04") and suffix == ".bin"
    if is_zip or head.startswith(LEGACY_TORCH) or (suffix in _TORCH_SUFFIXES and b"\0" in head):
        return TORCH_FILE, f"{start_from(path)} {import_it(path, IF_TOKENS)}"
    if kind == "checkpoint":
        fix = f"Name the checkpoint: train.init_from={in_shell(folder)}."
        return f"a file of the checkpoint {folder}", fix
    if head.startswith(b"GGUF"):
        return "a GGUF file", _GGUF
    if head[8:10] == b'{"' and suffix == ".safetensors":
        return "a file of model weights", start_from(path)
    if head.startswith(b"\x93NUMPY"):
        return "a NumPy array", import_it(path, IF_TOKENS)
    if head.startswith(_MEGATRON):
        return "the index of a Megatron dataset", _BY_HAND
    if suffix == ".bin":
        if path.with_suffix(".idx").is_file():
            return "the data of a Megatron dataset", _BY_HAND
        if head[:4] in LLM_C:
            return "a file of tokens in llm.c's format", import_it(path)
        if not is_text(head):
            return "a binary file", import_it(path, IF_TOKENS)
    return None


def start_from(path: Path) -> str:
    """Return a sentence with the key that starts a run from weights."""
    return f"If it contains weights, start a run from them: train.init_from={in_shell(path)}."


def import_it(path: Path, start: str = "Import it") -> str:
    """Return a sentence with the command that imports tokens; nanoGPT's files as a directory."""
    if path.name in ("train.bin", "val.bin") and _has(path.parent, "train.bin", "val.bin"):
        path = path.parent
    out = Path("data", path.absolute().name.partition(".")[0])
    if out.absolute() == path.absolute():
        out = out.with_name(f"{out.name}-imported")
    command = f"flatout import {in_shell(path)} --out {in_shell(out)}"
    if _has(path if path.is_dir() else path.parent, "metadata.json"):
        return f"{start}: `{command}`, with --tokenizer FILE if metadata.json names none."
    return (
        f"{start}: `{command} --tokenizer FILE`, where FILE is the tokenizer that made the tokens."
    )


def prepare_it(path: Path, pattern: str = "") -> str:
    """Return a sentence with the command that prepares text, of some files of a directory."""
    command = f"flatout prepare {in_shell(path / pattern)} --out {in_shell(f'data/{path.stem}')}"
    return f"If it is text, prepare it: `{command}`."


def is_text(head: bytes) -> bool:
    """Return whether bytes are UTF-8 without zero bytes, except for a character cut at the end."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4 and b"\0" not in head
    return b"\0" not in head
