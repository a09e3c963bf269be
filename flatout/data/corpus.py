"""What `prepare SOURCE...` names: a path, a glob, a source, a data set card, or a source of the user's own."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from flatout.config import Section
from flatout.data.download import check_file, download
from flatout.documents import parse_yaml
from flatout.errors import ConfigError, DataError
from flatout.progress import SILENT, Progress
from flatout.registry import DATASETS, SOURCES, nearest
from flatout.sources import Part, parts_of

CACHE = Path("~/.cache/flatout")
"""Where cards' files are kept."""


class Card(Section):
    """A named corpus: `flatout/datasets/NAME.yaml`."""

    address: str
    """Where its file is."""
    revision: str
    """Which version of it."""
    license: str
    """Under which terms."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Checksum of the file."""
    num_bytes: int = Field(ge=1)
    """Size of the file."""
    source: str = "files"
    """Source that reads it; it is called with `path`."""
    text_field: str = "text"
    """Field of a JSONL row that holds the text."""
    split: str | None = None
    """Its split rule; None leaves it to prepare."""


@dataclass(frozen=True)
class Corpus:
    """Every part of what was named, in the order named."""

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    split: str | None
    """The split rule of the card, when the corpus is one card."""

    @property
    def fingerprint(self) -> str:
        """A digest that changes when the documents change."""
        marks = "\n".join(part.fingerprint for part in self.parts if part.fingerprint)
        return hashlib.sha256(marks.encode("utf-8", errors="surrogateescape")).hexdigest()


def load_card(name: str) -> Card:
    """Return a data set card.

    Raises: ConfigError when there is none of this name; DataError when it is not a card.
    """
    try:
        return Card.model_validate(DATASETS.get(name))
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{DATASETS.path(name)}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}.", fix="Repair the card.") from error


def open_corpus(
    names: Sequence[str], *, text_field: str | None = None, from_file: str | None = None, cache: Path = CACHE, progress: Progress = SILENT
) -> Corpus:
    """Return the parts of everything named; a card's file is fetched unless it is in the cache or given as `from_file`.

    Raises: DataError when a name is none of what can be named, or names nothing.
    """
    if not names:
        raise DataError(
            "No source is named.", fix="Name a file, a folder, a source or a data set, for example `flatout prepare book.txt --out data/book`."
        )
    cards = [name for name in names if name in DATASETS.names()]
    if from_file is not None and len(cards) != 1:
        raise DataError(
            "--from gives the file of one data set card.", fix=f"Name one of {', '.join(DATASETS.names())}, or name the file itself as the source."
        )
    parts: list[Part] = []
    for name in names:
        if name in cards:
            parts.extend(_card_parts(name, text_field, from_file, cache, progress))
        else:
            parts.extend(_named_parts(name, text_field))
    return Corpus(tuple(names), tuple(parts), load_card(cards[0]).split if len(names) == len(cards) == 1 else None)


def _card_parts(name: str, text_field: str | None, from_file: str | None, cache: Path, progress: Progress) -> list[Part]:
    card = load_card(name)
    if from_file is not None:
        file = Path(from_file).expanduser()
        check_file(file, card.sha256)
    else:
        if Path(name).exists():
            progress.say(f"{name} is taken as the data set of that name; write ./{name} for the file or folder here.")
        target = cache.expanduser() / name / card.address.rpartition("/")[2]
        file = download(card.address, target, sha256=card.sha256, num_bytes=card.num_bytes, progress=progress)
    parts = parts_of(SOURCES.get(card.source), card.source, {"path": str(file), "text_field": text_field or card.text_field})
    marked = f"{name} {card.sha256}"
    return [Part(part.read, part.arguments, marked if index == 0 else "", part.num_bytes) for index, part in enumerate(parts)]


def _named_parts(name: str, text_field: str | None) -> list[Part]:
    if re.match(r"[a-z][a-z0-9+.-]*://", name):
        raise DataError(
            f"{name} is an address, and addresses are not read yet.", fix=f"Download it first, for example `curl -LO {name}`, and name the file."
        )
    source, _, rest = name.partition(":")
    key = source.replace("_", "-")
    if key in SOURCES.names() and key != "files":
        return parts_of(SOURCES.get(key), key, _parameters(rest, name))
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(:.*)?", name) and not Path(name).exists():
        module, function, *given = name.split(":", 2)
        reference = f"{module}:{function}"
        return parts_of(SOURCES.get(reference), reference, _parameters(given[0] if given else "", name))
    if "/" in name or Path(name).suffix or Path(name).expanduser().exists() or glob.has_magic(name):
        return parts_of(SOURCES.get("files"), "files", {"path": name, "text_field": text_field or "text"})
    known = sorted({*DATASETS.names(), *SOURCES.names()} - {"files"})
    here = [entry.name for entry in Path().iterdir()]
    guess = nearest(name, [*known, *here])
    hint = f"Did you mean {guess!r}? " if guess else ""
    raise DataError(f"There is no file, source or data set named {name!r}.", fix=f"{hint}Sources and data sets: {', '.join(known)}.")


def _parameters(text: str, name: str) -> dict[str, Any]:
    """Return the parameters in `documents=1000,seed=0`."""
    parameters: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise DataError(
                f"{name!r}: {item!r} is not a parameter.", fix="Write NAME:key=value,key=value, for example synthetic:documents=1000,seed=0."
            )
        try:
            parameters[key.strip()] = parse_yaml(value, name=name)
        except ConfigError as error:
            raise DataError(f"{name!r}: {item!r} cannot be read.", fix=error.fix) from error
    return parameters
