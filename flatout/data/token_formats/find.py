"""Finds the token files of a path, and which of them are for validation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flatout.config.registry import TOKEN_FORMATS
from flatout.data.sources.packed import unreadable
from flatout.data.token_formats import TokenFormat
from flatout.errors import DataError, in_shell
from flatout.storage.recognised import recognise

_SPLIT = re.compile(r"(?:^|[_.-])(train|training|val|valid|validation|test)(?=[_.-]|$)")
VALIDATION = {"val", "valid", "validation"}
EXAMPLES = "train.bin, tokens.npy, chunk_000000.pt"


@dataclass(frozen=True)
class Input:
    """A path in a known format."""

    path: Path
    name: str
    """The format's name."""
    format: TokenFormat
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Found:
    """The inputs of a path, in the order in which they are read."""

    train: tuple[Input, ...]
    val: tuple[Input, ...] = ()
    """Separate validation tokens. Without them, they are taken from the end."""
    left_out: tuple[str, ...] = ()
    """Test files, which are not read."""

    @property
    def files(self) -> list[Path]:
        """All files to read."""
        return [file for one in (*self.train, *self.val) for file in one.files]


def find_tokens(path: Path, val: Path | None = None, form: str | None = None) -> Found:
    """Return the token files of a path: a file, a directory in some format, or of such inputs.

    In a directory of several, `val` in a name marks validation tokens, and `test` is omitted.
    `form` names the format, for files with unusual names.

    Raises: DataError when there are none, a file is missing, or formats are mixed; ConfigError for
            an unknown format.
    """
    found = _found(path, form)
    if val is None:
        return found
    if found.val:
        raise DataError(
            f"{path} contains validation tokens, {found.val[0].path.name}, and --val names others.",
            fix="Remove --val, or name the training tokens alone.",
        )
    other = _found(val, form)
    if {file.resolve() for file in other.files} & {file.resolve() for file in found.files}:
        raise DataError(
            f"--val {val} is also training data: validating on it measures nothing.",
            fix="Name other tokens, or remove --val to use the last tenth.",
        )
    return Found(found.train, (*other.train, *other.val), (*found.left_out, *other.left_out))


def _found(path: Path, form: str | None) -> Found:
    one = _input(path, form, named=True)
    if one is not None:
        return Found((one,))
    if not path.is_dir():
        raise _unknown(path)
    inside = [_input(entry, form) for entry in sorted(path.iterdir()) if entry.name[0] != "."]
    inputs = [found for found in inside if found is not None]
    if not inputs:
        raise _unknown(path)
    formats = sorted({found.name for found in inputs})
    if len(formats) > 1:
        examples = {found.name: found.path.name for found in inputs}
        shown = " and ".join(f"{examples[name]} ({name})" for name in formats[:2])
        raise DataError(
            f"{path} contains tokens in several formats: {shown}.",
            fix="Name one of the files, or the format: --format NAME.",
        )
    by_split: dict[str, list[Input]] = {}
    for found in inputs:
        match = _SPLIT.search(found.path.name.lower())  # the first such word. Else it is training
        word = match[1] if match else "train"
        split = "val" if word in VALIDATION else "test" if word == "test" else "train"
        by_split.setdefault(split, []).append(found)
    train, val = by_split.get("train", []), by_split.get("val", [])
    if not train:
        raise DataError(
            f"{path} contains only tokens for {'validation' if val else 'tests'}.",
            fix="Name a file as training tokens, and another with --val.",
        )
    left_out = tuple(found.path.name for found in by_split.get("test", []))
    return Found(tuple(train), tuple(val), left_out)


def _input(path: Path, form: str | None, *, named: bool = False) -> Input | None:
    """Return a path as an input, or None when no format takes it.

    A file that the user names in a `form` need not have its usual suffix.
    """
    names = TOKEN_FORMATS.names() if form is None else [form]
    try:
        taken = next((name for name in names if TOKEN_FORMATS.get(name).takes(path)), None)
        if taken is None and named and form is not None and path.is_file():
            taken = form
        if taken is None:
            return None
        found = TOKEN_FORMATS.get(taken)
        return Input(path, taken, found, tuple(found.files(path)))
    except OSError as error:
        raise unreadable(str(path), error) from error


def _unknown(path: Path) -> DataError:
    """Return the error for a path without tokens."""
    known = recognise(path)
    if known is not None:
        return DataError(
            known.instead_of("tokens in a format that `flatout import` reads"), fix=known.fix
        )
    if not path.exists():
        return DataError(
            f"There is no file or directory {path}.",
            fix=f"Check the path. `import` reads {EXAMPLES}.",
        )
    if path.is_dir():
        return DataError(
            f"{path} has no token files.",
            fix=f"Name the directory or the file that contains them: {EXAMPLES}.",
        )
    out = in_shell(f"data/{path.stem}")
    return DataError(
        f"{path} is not a token file of a known format.",
        fix=f"If it is text, prepare it: `flatout prepare {in_shell(path)} --out {out}`. If it "
        "contains tokens without a header, add --format raw.",
    )
