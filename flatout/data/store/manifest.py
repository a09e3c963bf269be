"""manifest.json lists a dataset's content. It is written last, so it marks a complete dataset."""

from __future__ import annotations

import hashlib
import json
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)

from flatout.config.registry import nearest
from flatout.data.sources import RowLocation
from flatout.errors import DataError, in_shell, without_secrets
from flatout.storage.files import BLOCK_BYTES as BLOCK_BYTES
from flatout.storage.files import FileEntry as FileEntry
from flatout.storage.files import Stored
from flatout.storage.json_io import JsonObject
from flatout.storage.recognised import kind_of, read_regular, recognise

FORMAT_VERSION = 3
"""In version 3, a shard has the tokens of both splits, and its own document ends."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")


class SplitCounts(Stored):
    """How much of one split there is, in a shard or in the whole dataset."""

    tokens: int = Field(0, ge=0)
    """Tokens, including end-of-text tokens."""
    documents: int = Field(0, ge=0)
    """Documents that end there."""
    text_bytes: int = Field(0, ge=0)
    """UTF-8 bytes of the text before tokenisation: the denominator of bits per byte."""

    def __add__(self, other: SplitCounts) -> SplitCounts:
        return SplitCounts(
            tokens=self.tokens + other.tokens,
            documents=self.documents + other.documents,
            text_bytes=self.text_bytes + other.text_bytes,
        )


class ShardEntry(Stored):
    """The files of one range of the text. Each has the part of train, followed by that of val."""

    tokens: FileEntry
    """Tokens, in the dtype of the dataset."""
    ends: FileEntry
    """Little-endian int64: the position after each document's last token, counted from the start of
    its split's tokens in this shard.
    """
    mask: FileEntry | None = None
    """One uint8 per token, 0 where a target does not count. All shards have one, or none."""
    splits: dict[SplitName, SplitCounts]
    """Contents of each part."""
    crc32: dict[SplitName, tuple[int, int, int]]
    """CRC-32 of the tokens, the ends and the mask of each part. Equal ones are of equal text."""

    @property
    def files(self) -> list[FileEntry]:
        """Its files."""
        return [entry for entry in (self.tokens, self.ends, self.mask) if entry is not None]

    def start(self, name: SplitName) -> SplitCounts:
        """Return what is in these files before the part of a split."""
        return SplitCounts() if name == "train" else self.splits["train"]


class TokenizerEntry(Stored):
    """The dataset's tokenizer."""

    name: str
    """Name of the tokenizer."""
    digest: str
    """SHA-256 of its files, one after the other."""
    files: tuple[FileEntry, ...]
    """TOKENIZER, and tokenizer_config.json if there is one."""


def storable(name: str) -> str:
    """Return a name as valid UTF-8, and a URL without its secrets."""
    return without_secrets(
        name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
    )


def _to_json(location: RowLocation | str) -> tuple[str, int] | str:
    """Return a location as JSON values. Of a name that is not UTF-8, no line will be found."""
    if isinstance(location, str):
        return storable(location)
    return storable(location.name), location.offset


def _from_json(stored: Any) -> Any:
    return stored if isinstance(stored, RowLocation | str) else RowLocation(*stored)


StoredLocation = Annotated[
    RowLocation | str, BeforeValidator(_from_json), PlainSerializer(_to_json)
]
"""A row's location: by byte offset in the work directory, because finding its line number reads the
file again, and as text in a manifest.
"""


class SkippedRows(Stored):
    """Rows of the source that were omitted for one reason."""

    model_config = ConfigDict(frozen=False)

    reason: str
    """The reason."""
    count: int = Field(ge=1)
    """Number of rows."""
    first: tuple[StoredLocation, ...] = ()
    """Locations of the first few."""

    def named(self) -> SkippedRows:
        """Return these rows for a manifest, with locations as text. Their files are read again."""
        return self.model_copy(update={"first": tuple(storable(str(one)) for one in self.first)})


class Counted(Stored):
    """What there is in some shards."""

    shards: tuple[ShardEntry, ...] = ()
    """The files with tokens, in the order of the text."""
    cut_documents: int = Field(0, ge=0)
    """Documents cut at the start of validation. Both splits count them."""

    @property
    def splits(self) -> dict[SplitName, SplitCounts]:
        """Contents of train and val."""
        counts = {name: [shard.splits[name] for shard in self.shards] for name in SPLITS}
        return {name: sum(parts, SplitCounts()) for name, parts in counts.items()}

    @property
    def tokens(self) -> int:
        """Tokens in both splits."""
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents(self) -> int:
        """Documents in both splits. One that is cut between them counts once."""
        return sum(split.documents for split in self.splits.values()) - self.cut_documents

    @property
    def text_bytes(self) -> int:
        """Text bytes in both splits."""
        return sum(split.text_bytes for split in self.splits.values())


class Manifest(Counted):
    """The content of a complete dataset directory."""

    kind: Literal["dataset"] = "dataset"
    """What the directory is."""
    format_version: int = FORMAT_VERSION
    flatout: str | None = None
    """The version of flatout that wrote it."""
    """Version of the directory's format."""
    dtype: Literal["uint16", "uint32"]
    """Type of a stored token, little-endian."""
    vocab_size: int = Field(ge=1)
    """Number of token ids. Every id is below it."""
    tokenizer: TokenizerEntry
    """The tokenizer that made the tokens."""
    source: JsonObject
    """The source of the text, with every parameter that affected it."""
    split_rule: str
    """How documents were divided into train and val."""
    skipped: tuple[SkippedRows, ...] = ()
    """Rows that were omitted, by reason."""
    sha256: str = ""
    """Digest of the rest of the manifest."""

    def sealed(self) -> Self:
        """Return this manifest with its digest."""
        return self.model_copy(update={"sha256": _digest(json.loads(self.model_dump_json()))})

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file in the directory except the manifest."""
        shards = chain.from_iterable(shard.files for shard in self.shards)
        return (*shards, *self.tokenizer.files)

    @property
    def is_masked(self) -> bool:
        """Whether the loss ignores some tokens."""
        return any(shard.mask is not None for shard in self.shards)

    def digest_of(self, name: SplitName) -> str:
        """Return a digest of a split's tokens, masks and document ends, from the checksums."""
        parts = [
            (shard.splits[name], shard.crc32[name])
            for shard in self.shards
            if shard.splits[name].tokens
        ]
        text = repr((self.vocab_size, self.dtype, parts))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest stored type that can represent every id below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a dataset directory.

    Raises: DataError when there is none, it cannot be read, or its format is newer than this
            version of flatout.
    """
    path = folder / MANIFEST
    if kind_of(folder) not in (None, "dataset"):
        raise _no_dataset(folder)
    try:
        text = read_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_dataset(folder) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"Cannot read {path}: {getattr(error, 'strerror', error)}.",
            fix="Check its permissions, or prepare the dataset again.",
        ) from error
    return parse_manifest(text, path)


def _no_dataset(folder: Path) -> DataError:
    """Return the error for a path that is not a dataset, with what it is and how to prepare one."""
    known = recognise(folder)
    if known is not None:
        return DataError(known.instead_of("a prepared dataset"), fix=known.fix)
    if folder.is_file():
        out = in_shell(f"data/{folder.stem}")
        fix = f"Prepare it with `flatout prepare {in_shell(folder)} --out {out}`, then use {out}."
        return DataError(f"{folder} is a file, not a dataset directory.", fix=fix)
    if folder.is_dir() and any(folder.iterdir()):
        fix = "Name a different one, or prepare one with `flatout prepare SOURCE --out data/mine`."
        return DataError(f"{folder} has no {MANIFEST}: it is not a complete dataset.", fix=fix)
    beside = (
        [path.parent.name for path in folder.parent.glob(f"*/{MANIFEST}")] if folder.name else []
    )
    guess = nearest(folder.name, beside)
    hint = f"Did you mean {str(folder.parent / guess)!r}? If not: prepare" if guess else "Prepare"
    missing = (
        f"{folder} has no {MANIFEST}: it is empty"
        if folder.is_dir()
        else f"There is no dataset directory {folder}"
    )
    return DataError(
        f"{missing}.", fix=f"{hint} it with `flatout prepare SOURCE --out {in_shell(folder)}`."
    )


def parse_manifest(text: str, path: Path | str) -> Manifest:
    """Parse a manifest from a file's text.

    Raises: DataError naming the file when it is not a manifest, it is damaged, or its format is not
            that of this version of flatout.
    """
    try:
        document = json.loads(text)
        version = int(document["format_version"])
        if version == FORMAT_VERSION:
            manifest = Manifest.model_validate_json(text)
            if _digest(document) == manifest.sha256:
                return manifest
            raise DataError(
                f"{path} is damaged: its content does not match its digest.",
                fix="Restore it from a copy, or prepare the dataset again into a different "
                "directory.",
            )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
        raise DataError(
            f"{path} is not a manifest: {what}.",
            fix="Prepare the dataset again into a different directory.",
        ) from error
    newer = version > FORMAT_VERSION
    raise DataError(
        f"{path} has format {version}, of {'a newer' if newer else 'an earlier'} version of "
        f"flatout. This version reads format {FORMAT_VERSION}.",
        fix="Install a newer flatout, or prepare the dataset again into a different directory."
        if newer
        else "Prepare the dataset again into a different directory.",
    )


def _digest(document: JsonObject) -> str:
    """Return the digest of a manifest's content, excluding the digest field."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
