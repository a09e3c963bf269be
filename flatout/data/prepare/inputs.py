"""What `prepare SOURCE...` names: a path, a glob, an address, standard input, a source, a data set
card, or a source of the user's own.
"""

from __future__ import annotations

import glob
import hashlib
import inspect
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from flatout.cache import CACHE
from flatout.config.schema import Section
from flatout.data.prepare.stdin import spool_standard_input
from flatout.documents import parse_yaml
from flatout.errors import ConfigError, DataError, in_shell
from flatout.files import expanded
from flatout.progress import SILENT, Progress
from flatout.registry import DATASETS, SOURCES, nearest
from flatout.sources import ReadTask, read_tasks_of
from flatout.sources.files import files_of, first_changed, has_rows, passed_over_in, shared_file
from flatout.sources.local import matches
from flatout.sources.originals import LocalFile
from flatout.transfer.download import check_file, download
from flatout.transfer.urls import is_url

STANDARD_INPUT = "-"


class Card(Section):
    """A named corpus: `flatout/datasets/NAME.yaml`. Either one file, fetched once, or files of a
    Hugging Face data set, read where they are.
    """

    address: str | None = None
    """Where its one file is."""
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Checksum of that file."""
    num_bytes: int | None = Field(default=None, ge=1)
    """Size of that file."""
    repository: str | None = Field(default=None, pattern="^[^/@]+/[^/@]+$")
    """The Hugging Face data set that holds its files."""
    files: str | None = None
    """A glob of them inside the repository."""
    validation: str | None = None
    """A glob of the files there that are for validation alone; None leaves it to the split rule."""
    revision: str
    """Which version of it; of a repository, a commit."""
    license: str
    """Under which terms."""
    source: str = "files"
    """Source that reads it; it is called with `path`."""
    text_field: str = "text"
    """Field of a JSONL row that holds the text."""
    split: str | None = None
    """Its split rule, where no files are for validation; None leaves it to prepare."""

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        of_file = [given is not None for given in (self.address, self.sha256, self.num_bytes)]
        of_repository = [given is not None for given in (self.repository, self.files)]
        is_file = all(of_file) and not any(of_repository) and self.validation is None
        is_repository = all(of_repository) and not any(of_file)
        if not is_file and not is_repository:
            raise ConfigError(
                "A card names one file or a repository.",
                fix="State address, sha256 and num_bytes, or repository, files and perhaps validation, and none of the others.",
            )
        if self.validation is not None and self.split is not None:
            raise ConfigError(
                "A card states a split rule or files for validation.",
                fix="Leave split or validation out.",
            )
        return self

    def address_of(self, files: str) -> str:
        """Return the address of files of its repository."""
        return f"hf://datasets/{self.repository}@{self.revision}/{files}"


@dataclass(frozen=True)
class Corpus:
    """Every part of what was named, in the order named."""

    names: tuple[str, ...]
    parts: tuple[ReadTask, ...]
    split: str | None
    """The split rule that is asked for, or that of the card when the corpus is one card."""
    validation: Corpus | None = None
    """Text for validation alone; with it, no rule is followed."""
    moment: str = ""
    """What changes when a file here is written again, in validation text too: a digest of sizes and
    times. Nothing where there is none, but for
    standard input and what a card has, which a checksum of their own marks."""

    @property
    def all_parts(self) -> tuple[ReadTask, ...]:
        """Every part, those for validation first: the order they are packed in."""
        return self.parts if self.validation is None else (*self.validation.parts, *self.parts)

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
        raise DataError(
            f"{DATASETS.path(name)}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}.",
            fix="Repair the card.",
        ) from error


def open_corpus(
    names: Sequence[str],
    *,
    val: Sequence[str] = (),
    split: str | None = None,
    text_field: str | None = None,
    mask_field: str | None = None,
    include: Sequence[str] = (),
    encoding: str | None = None,
    from_file: str | None = None,
    cache: Path = CACHE,
    spool: Path | None = None,
    progress: Progress = SILENT,
) -> Corpus:
    """Return the parts of everything named; a card's file is fetched unless it is in the cache or
    given as `from_file`.

    `val` names text for validation alone; without it and without a `split` rule, a card's own is
    taken when the corpus is one card. `text_field` holds the text of a row, `mask_field` what comes
    before it and is not learned from. `include` are patterns of files that are taken from folders
    besides those that always are; `encoding` is that of text that is not UTF-8. Standard input,
    `-`, is kept in the folder `spool` until the process ends; None is the system's folder for such
    files.

    Raises: DataError when a name is none of what can be named, or names nothing.
    """
    if not names:
        raise DataError(
            "No source is named.",
            fix="Name a file, a folder, a source or a data set, for example `flatout prepare book.txt --out data/book`.",
        )
    if [*names, *val].count(STANDARD_INPUT) > 1:
        raise DataError(
            "Standard input is named twice.", fix="Name `-` once: it can be read only once."
        )
    cards = [name for name in names if name in DATASETS.names()]
    if from_file is not None and len(cards) != 1:
        raise DataError(
            "--from gives the file of one data set card.",
            fix=f"Name one of {', '.join(DATASETS.names())}, or name the file itself as the source.",
        )
    for name in val:
        if name in DATASETS.names():
            raise DataError(
                f"--val {name} is a data set card, not text.",
                fix=f"Name the card as the source, or ./{name} for the file or folder here.",
            )
    asked = {
        "text_field": text_field,
        "mask_field": mask_field,
        "include": tuple(include) or None,
        "encoding": encoding,
    }
    fields = {key: value for key, value in asked.items() if value is not None}
    opened = [
        _card_parts(name, fields, from_file, cache, progress)
        if name in cards
        else _text_parts(name, fields, spool, progress)
        for name in names
    ]
    apart = [_text_parts(name, fields, spool, progress) for name in val]
    moment = _moment(
        parts
        for name, parts in zip([*names, *val], [*opened, *apart], strict=True)
        if name not in (*cards, STANDARD_INPUT)
    )
    _check_rows([*names, *val], [*chain(*opened), *chain(*apart)], text_field)
    _check_include([*chain(*opened), *chain(*apart)], include)
    for name, parts in zip([*names, *val], [*opened, *apart], strict=True):
        _tell_passed_over(name, parts, progress)
    card = load_card(cards[0]) if len(names) == len(cards) == 1 else None
    held_out: Corpus | None = None
    if val:
        held_out = Corpus(tuple(val), tuple(chain.from_iterable(apart)), None)
    elif card is not None and card.validation is not None and split is None:
        address = card.address_of(card.validation)
        held_out = Corpus(
            (address,),
            tuple(_source_parts(card.source, {"path": address}, _fields_of(card) | fields)),
            None,
        )
    return Corpus(
        tuple(names),
        tuple(chain.from_iterable(opened)),
        split or (card.split if card is not None else None),
        held_out,
        moment,
    )


def _check_include(parts: Sequence[ReadTask], include: Sequence[str]) -> None:
    """Refuse a pattern that no file fits.

    Raises: DataError.
    """
    for pattern in include:
        if not any(matches(path, pattern) for part in parts for path in files_of(part)):
            fix = f"Quote the pattern, and check it with `find FOLDER -name {in_shell(pattern)}`; it takes files of folders that are named as sources."
            raise DataError(f"--include {pattern!r} fits no file.", fix=fix)


def _tell_passed_over(name: str, parts: Sequence[ReadTask], progress: Progress) -> None:
    """Say which files of a folder are not read, before the work is done without them."""
    counts: Counter[str] = Counter()
    for left_out in passed_over_in(parts):
        counts[left_out.reason] += left_out.count
    if counts:
        kinds = ", ".join(
            f"{count:,} {reason.removesuffix(' file')}" for reason, count in counts.items()
        )
        suffix = next(
            (reason.removesuffix(" file") for reason in counts if reason.startswith(".")), ""
        )
        progress.say(
            f"{name}: {counts.total():,} of its files are not read: {kinds}. --include '*{suffix}' takes such files too."
        )


def _check_rows(names: Sequence[str], parts: Sequence[ReadTask], text_field: str | None) -> None:
    """Refuse a field where there are no rows to have it.

    Raises: DataError.
    """
    if text_field is not None and parts and not any(has_rows(part) for part in parts):
        raise DataError(
            f"{' '.join(names)} holds no rows, so it has no field {text_field!r}.",
            fix="Leave --text-field out, or let the names of files that hold a JSON object a line end in .jsonl.",
        )


def _moment(opened: Iterable[Sequence[ReadTask]]) -> str:
    """Return a digest of the sizes and times of the files here that some parts read; nothing when
    there are none.
    """
    originals = (
        one
        for parts in opened
        for part in parts
        for one in part.originals
        if isinstance(one, LocalFile)
    )
    found = {one.path: one for one in originals}
    marks = "".join(f"{one.size} {one.mtime_ns}\n" for one in found.values())
    return hashlib.sha256(marks.encode()).hexdigest() if marks else ""


def require_unchanged(corpus: Corpus) -> None:
    """Check that the files of a corpus that has been read are those that were listed when it was
    opened.

    Raises: DataError naming the first that is not; Unreachable.
    """
    changed = first_changed(corpus.all_parts)
    if changed is not None:
        raise DataError(
            f"{changed} was changed or deleted while it was being prepared: the dataset would hold text of both versions.",
            fix="Run the same command again when nothing writes to that file any more, or prepare a copy of it.",
        )


def on_both_sides(corpus: Corpus) -> str | None:
    """Return the first file or source of the validation text that is in the text to train on too;
    None when there is none.

    Files here are told by their content, whatever they are called, those at addresses by these,
    other sources by their fingerprints.
    """
    if corpus.validation is None:
        return None
    known = {part.fingerprint for part in corpus.parts if part.fingerprint and not files_of(part)}
    again = (part.fingerprint for part in corpus.validation.parts if part.fingerprint in known)
    return shared_file(corpus.parts, corpus.validation.parts) or next(again, None)


def _text_parts(
    name: str, fields: dict[str, Any], spool: Path | None, progress: Progress
) -> list[ReadTask]:
    if name != STANDARD_INPUT:
        return _named_parts(name, fields)
    file, sha256 = spool_standard_input(spool, encoding=fields.get("encoding"), progress=progress)
    return _marked(_source_parts("files", {"path": str(file)}, fields), f"standard input {sha256}")


def _card_parts(
    name: str, fields: dict[str, Any], from_file: str | None, cache: Path, progress: Progress
) -> list[ReadTask]:
    card = load_card(name)
    fields = _fields_of(card) | fields
    if from_file is None and Path(name).exists():
        progress.say(
            f"{name} is taken as the data set of that name; write ./{name} for the file or folder here."
        )
    if card.address is None or card.sha256 is None:
        assert card.files is not None
        if from_file is not None:
            raise DataError(
                f"{name} is not one file, so --from cannot give it.",
                fix=f"Name your copies of {card.files} as the source.",
            )
        return _source_parts(card.source, {"path": card.address_of(card.files)}, fields)
    if from_file is not None:
        file = expanded(from_file)
        check_file(file, card.sha256)
    else:
        target = cache.expanduser() / name / card.address.rpartition("/")[2]
        file = download(
            card.address, target, sha256=card.sha256, num_bytes=card.num_bytes, progress=progress
        )
    return _marked(_source_parts(card.source, {"path": str(file)}, fields), f"{name} {card.sha256}")


def _fields_of(card: Card) -> dict[str, str]:
    return {"text_field": card.text_field} if "text_field" in card.model_fields_set else {}


def _marked(parts: list[ReadTask], mark: str) -> list[ReadTask]:
    """Return the parts of what is known by a mark of its own, wherever its file lies."""
    return [
        replace(part, fingerprint=mark if index == 0 else "") for index, part in enumerate(parts)
    ]


def _named_parts(name: str, fields: dict[str, Any]) -> list[ReadTask]:
    if is_url(name):
        return _source_parts("files", {"path": name}, fields)
    source, _, rest = name.partition(":")
    key = source.replace("_", "-")
    if key in SOURCES.names() and key != "files":
        return _source_parts(key, _parameters_of(key, rest, name), fields)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(:.*)?", name) and not os.path.exists(name):
        module, function, *given = name.split(":", 2)
        return _source_parts(
            f"{module}:{function}", _parameters(given[0] if given else "", name), fields
        )
    if "/" in name or Path(name).suffix or os.path.exists(expanded(name)) or glob.has_magic(name):
        return _source_parts("files", {"path": name}, fields)
    known = sorted({*DATASETS.names(), *SOURCES.names()} - {"files"})
    here = [entry.name for entry in Path().iterdir()]
    guess = nearest(name, [*known, *here])
    hint = f"Did you mean {guess!r}? " if guess else ""
    raise DataError(
        f"There is no file, source or data set named {name!r}.",
        fix=f"{hint}Sources and data sets: {', '.join(known)}.",
    )


def _source_parts(name: str, parameters: dict[str, Any], fields: dict[str, Any]) -> list[ReadTask]:
    """Return the parts of a source, which is given what was asked for of rows and files.

    Raises: DataError for a field where there are no rows to have it, and where it reads no files.
    """
    source = SOURCES.get(name)
    taken = inspect.signature(source).parameters
    for key, option in (("mask_field", "--mask-field"), ("text_field", "--text-field")):
        if key in fields and key not in taken:
            raise DataError(
                f"The source {name!r} has no rows, so it has no field {fields[key]!r}.",
                fix=f"Leave {option} out.",
            )
    for key in ("include", "encoding"):
        if key in fields and key not in taken:
            raise DataError(
                f"The source {name!r} reads no files of yours, so --{key} says nothing to it.",
                fix=f"Leave --{key} out.",
            )
    return read_tasks_of(
        source, name, {key: field for key, field in fields.items() if key in taken} | parameters
    )


def _parameters_of(source: str, text: str, name: str) -> dict[str, Any]:
    """Return the parameters in `ORG/NAME:split=train` for a source that takes a `name`, else those
    in `documents=1000,seed=0`.
    """
    first, _, rest = text.partition(":")
    if "name" in inspect.signature(SOURCES.get(source)).parameters and first and "=" not in first:
        return {"name": first} | _parameters(rest, name)
    return _parameters(text, name)


def _parameters(text: str, name: str) -> dict[str, Any]:
    """Return the parameters in `documents=1000,seed=0`."""
    parameters: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise DataError(
                f"{name!r}: {item!r} is not a parameter.",
                fix="Write NAME:key=value,key=value, for example synthetic:documents=1000,seed=0.",
            )
        try:
            parameters[key.strip()] = parse_yaml(value, name=name)
        except ConfigError as error:
            raise DataError(f"{name!r}: {item!r} cannot be read.", fix=error.fix) from error
    return parameters
