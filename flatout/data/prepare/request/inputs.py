"""The corpus: everything that `prepare SOURCE...` and `--val` name, opened and checked.

A source is a path, a glob, a URL, standard input, a registered source, or a card: a named corpus in
`flatout/data/datasets/`.
"""

from __future__ import annotations

import glob
import hashlib
import inspect
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from flatout.config.documents import parse_yaml
from flatout.config.registry import DATASETS, SOURCES, nearest
from flatout.config.sections import Section
from flatout.config.words import name_for, removed
from flatout.data.conversation.rendering import Renderer
from flatout.data.prepare.request.options import Options
from flatout.data.prepare.request.standard_input import spool_standard_input
from flatout.data.sources import ReadTask, read_tasks_of
from flatout.data.sources.fields import TEXT_FIELD, Fields
from flatout.data.sources.files import holds_rows
from flatout.data.sources.listing import InputFile, matches, shared_file
from flatout.errors import ConfigError, DataError, in_shell
from flatout.progress import SILENT, Progress
from flatout.storage.cache import ELSEWHERE, default_cache
from flatout.storage.files import FileEntry, expanded, not_written
from flatout.storage.remote.urls import is_url
from flatout.storage.whole import fetch_checked, problem_of

STANDARD_INPUT = "-"
FROM_FILE = "pass the file with --from FILE"

Parameters = dict[str, Any]


class Card(Section):
    """A named corpus, `data/datasets/NAME.yaml`: a file to download, a repository's files, or a
    file beside the card.

    A file is downloaded once. Files of a Hugging Face dataset are read in place.
    """

    url: str | None = None
    """URL of its file."""
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Checksum of that file."""
    num_bytes: int | None = Field(default=None, ge=1)
    """Size of that file."""
    file: str | None = None
    """Name of its file beside the card."""
    repository: str | None = Field(default=None, pattern="^[^/@]+/[^/@]+$")
    """The Hugging Face dataset that contains its files."""
    files: str | None = None
    """Glob of its files inside the repository."""
    validation: str | None = None
    """Glob of the validation files there. None leaves validation to the split rule."""
    revision: str
    """Version of the file. For a repository, a commit."""
    license: str
    """License of the text."""
    source: str = "files"
    """Source that reads it. It is called with `path`."""
    text_field: str = "text"
    """Field of a row that contains the text."""
    split: str | None = None
    """Its split rule, when it has no validation files. None leaves it to prepare."""

    def given(self, given: Parameters) -> Parameters:
        """Return what a source is given, with this card's text field unless another is stated."""
        fields = given["fields"]
        if not fields.is_stated:
            fields = replace(fields, text=self.text_field)
        return given | {"fields": fields}

    def url_of(self, files: str) -> str:
        """Return the URL of files in its repository."""
        return f"hf://datasets/{self.repository}@{self.revision}/{files}"


def load_card(name: str) -> Card:
    """Return a dataset card.

    Raises: ConfigError when there is no card of this name; DataError when its file is invalid.
    """
    try:
        card = Card.model_validate(DATASETS.get(name))
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{DATASETS.path(name)}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}.",
            fix="Correct the card.",
        ) from error
    if card.url is not None and None in (card.sha256, card.num_bytes):
        raise DataError(
            f"{DATASETS.path(name)} has a url without sha256 or num_bytes.", fix="State all three."
        )
    return card


@dataclass(frozen=True)
class Corpus:
    """The opened sources, in the order in which they were named."""

    names: tuple[str, ...]
    read_tasks: tuple[ReadTask, ...]
    split: str | None = None
    """The requested split rule, or the card's when the corpus is one card."""
    validation: Corpus | None = None
    """Separate validation text. With it, no split rule applies."""
    mtime_digest: str = ""
    """Digest of the sizes and mtimes of local files, validation included. Empty without any.

    Standard input and cards' files are excluded: checksums identify them.
    """

    @property
    def all_read_tasks(self) -> tuple[ReadTask, ...]:
        """All read tasks in the order they are packed: those of validation text come first."""
        return (*(self.validation.read_tasks if self.validation else ()), *self.read_tasks)

    @property
    def files(self) -> list[InputFile]:
        """The files of all read tasks."""
        return [file for task in self.all_read_tasks for file in task.files]

    @property
    def fingerprint(self) -> str:
        """A digest that changes when the documents change."""
        marks = "\n".join(task.fingerprint for task in self.read_tasks if task.fingerprint)
        return hashlib.sha256(marks.encode("utf-8", errors="surrogateescape")).hexdigest()


def open_corpus(
    names: Sequence[str],
    options: Options | None = None,
    *,
    from_file: str | None = None,
    cache: Path | None = None,
    spool: Path | None = None,
    progress: Progress = SILENT,
    chat: Renderer | None = None,
) -> Corpus:
    """Return the corpus of the named sources and of `options.val`.

    A card's file is downloaded unless it is in the cache or given as `from_file`. The split rule
    and validation files of a card apply when it is the only source and the options name none.
    Standard input, `-`, is kept in the directory `spool` until the process ends. `chat` writes
    conversations as text, when rows are conversations.

    Raises: DataError when a name is unknown, or nothing is found there.
    """
    options = options or Options()
    cache = cache or default_cache()
    cards = [name for name in names if name in DATASETS.names()]
    _check_names(names, options.val, cards, from_file)
    stated = options.text_field
    fields = Fields(stated or TEXT_FIELD.text, options.mask_field, chat, is_stated=bool(stated))
    given: Parameters = {"fields": fields, "include": options.include}
    all_names = [*names, *options.val]
    opened = [
        _card_tasks(name, given, from_file, cache, progress)
        if name in cards
        else _text_tasks(name, given, spool, progress)
        for name in all_names
    ]
    files = [[file for task in tasks for file in task.files] for tasks in opened]
    lack = [
        name for name, each in zip(all_names, files, strict=True) if each and not holds_rows(each)
    ]
    # text beside rows has no field, but it would be trained on where a prompt or a turn is masked
    if lack and (fields.prompt or chat or (options.text_field and len(lack) == len(files))):
        raise _no_rows(" ".join(lack))
    for pattern in options.include:
        if not any(matches(file.path, pattern) for file in chain(*files)):
            raise DataError(
                f"--include {pattern!r} matches no file.",
                fix=f"Quote the pattern, and check it with `find DIR -name {in_shell(pattern)}`"
                ". It applies to directories that are named as sources.",
            )
    marks: dict[str, str] = {}
    for name, tasks, found in zip(all_names, opened, files, strict=True):
        _report_passed_over(name, tasks, progress)
        if name not in (*cards, STANDARD_INPUT):
            marks |= {one.path: f"{one.size} {one.mtime_ns}\n" for one in found if one.mtime_ns}
    train, val = opened[: len(names)], opened[len(names) :]
    card = load_card(cards[0]) if len(names) == len(cards) == 1 else None
    validation = Corpus(options.val, tuple(chain(*val))) if val else None
    if validation is None and card is not None and card.validation and options.split is None:
        url = card.url_of(card.validation)
        held_out = source_tasks(card.source, {"path": url}, card.given(given))
        validation = Corpus((url,), tuple(held_out))
    return Corpus(
        tuple(names),
        tuple(chain(*train)),
        options.split or (card.split if card else None),
        validation,
        hashlib.sha256("".join(marks.values()).encode()).hexdigest() if marks else "",
    )


def _check_names(
    names: Sequence[str], val: Sequence[str], cards: Sequence[str], from_file: str | None
) -> None:
    """Check the combination of sources before any is opened.

    Raises: DataError.
    """
    if not names:
        raise DataError(
            "No source is named.",
            fix="Name a file, a directory, a source or a dataset, for example `flatout prepare "
            "book.txt --out data/book`.",
        )
    if [*names, *val].count(STANDARD_INPUT) > 1:
        raise DataError(
            "Standard input is named twice.", fix="Name `-` once: it can be read only once."
        )
    if from_file is not None and len(cards) != 1:
        raise DataError(
            "--from replaces the download of one dataset card.",
            fix=f"Name one of {', '.join(DATASETS.names())}, or name the file as the source.",
        )
    for name in val:
        if name in DATASETS.names():
            raise DataError(
                f"--val {name} is a dataset card, not text.",
                fix=f"Name the card as the source, or write ./{name} for the local file or "
                "directory.",
            )


def _report_passed_over(name: str, tasks: Sequence[ReadTask], progress: Progress) -> None:
    """Report the files of a directory that are not read, before the work starts."""
    counts: Counter[str] = Counter()
    for left_out in chain.from_iterable(task.skipped for task in tasks):
        counts[left_out.reason.removesuffix(" file")] += left_out.count
    if counts:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        suffix = next((kind for kind in counts if kind.startswith(".")), "")
        progress.say(
            f"{name}: {counts.total():,} of its files are not read: {kinds}. "
            f"--include '*{suffix}' reads them too."
        )


def _card_tasks(
    name: str,
    given: Parameters,
    from_file: str | None,
    cache: Path,
    progress: Progress,
) -> list[ReadTask]:
    """Return the read tasks of a card, whose file is downloaded unless it is in the cache."""
    card = load_card(name)
    given = card.given(given)
    if from_file is None and Path(name).exists():
        progress.say(
            f"{name} is the dataset card of that name. Write ./{name} to use the local file "
            "or directory."
        )
    if card.url is None:
        if from_file is not None:
            raise DataError(
                f"{name} is not the download of a single file, so --from cannot replace it.",
                fix="Remove --from, or name your copies of its files as the source.",
            )
        path = card.url_of(card.files or "")
        if card.file is not None:
            path = str(DATASETS.path(name).with_name(card.file))
        return source_tasks(card.source, {"path": path}, given)
    entry = FileEntry(name="file", size_bytes=card.num_bytes, sha256=card.sha256)
    if from_file is not None:
        file = expanded(from_file)
        if problem := problem_of(file, entry):
            fix = "Pass the original file, or prepare this one by its path, without --from."
            raise DataError(problem, fix=fix)
    else:
        file = cache.expanduser() / name / card.url.rpartition("/")[2]
        _download(card.url, file, entry, progress)
    tasks = source_tasks(card.source, {"path": str(file)}, given)
    return _with_fingerprint(tasks, f"{name} {card.sha256}")


def _download(url: str, file: Path, entry: FileEntry, progress: Progress) -> None:
    """Download a card's file, unless it is in the cache.

    Raises: DataError when the server does not answer or returns a different file, or the cache
            cannot be written; MissingPackage.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        total = entry.size_bytes / 1e6
        with progress.task(f"Downloading {url}", total=total, unit="MB") as task:
            fix = "The file at this URL has changed."
            fetch_checked(url, file, entry, lambda moved: task.advance(moved / 1e6), fix=fix)
    except OSError as error:
        what = not_written(file, error).what
        raise DataError(what, fix=f"Make it writable, {ELSEWHERE}, or {FROM_FILE}.") from error
    except DataError as error:
        raise DataError(error.what, fix=f"{error.fix} Or {FROM_FILE}.") from error


def _text_tasks(
    name: str, given: Parameters, spool: Path | None, progress: Progress
) -> list[ReadTask]:
    """Return the read tasks of a source that is not a card."""
    if name != STANDARD_INPUT:
        return source_tasks(*_source_and_parameters(name), given)
    file, sha256 = spool_standard_input(spool or Path(), progress=progress)
    tasks = source_tasks("files", {"path": str(file)}, given)
    return _with_fingerprint(tasks, f"standard input {sha256}")


def source_tasks(name: str, parameters: Parameters, given: Parameters) -> list[ReadTask]:
    """Return the read tasks of a source, called with its parameters and what it takes of `given`:
    `fields`, if it reads rows, and `include`, if it searches directories.

    Raises: DataError when fields are named for a source without rows.
    """
    source = SOURCES.get(name)
    takes = inspect.signature(source).parameters
    if "fields" not in takes and given["fields"] != TEXT_FIELD:
        raise _no_rows(name)
    taken = {key: value for key, value in given.items() if key in takes}
    return read_tasks_of(source, name, taken | parameters)


def _no_rows(names: str) -> DataError:
    return DataError(
        f"{names} has no rows: --text-field, --mask-field and --chat have no effect.",
        fix="Remove them, or name JSONL (files that end in .jsonl), CSV or Parquet.",
    )


def _with_fingerprint(tasks: list[ReadTask], fingerprint: str) -> list[ReadTask]:
    """Return the tasks with one fingerprint for all their content, wherever its file is."""
    return [
        replace(task, fingerprint=fingerprint if index == 0 else "")
        for index, task in enumerate(tasks)
    ]


def _source_and_parameters(name: str) -> tuple[str, Parameters]:
    """Return the registered source that a name stands for, and its parameters."""
    files = "files", {"path": name}
    if is_url(name):
        return files
    source, _, rest = name.partition(":")
    key = source.replace("_", "-")
    if key in SOURCES.names() and key != "files":
        return key, _parameters(rest, key, name)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(:.*)?", name) and not os.path.exists(name):
        module, function, *given = name.split(":", 2)
        own = f"{module}:{function}"
        return own, _parameters(given[0] if given else "", own, name)
    if "/" in name or Path(name).suffix or os.path.exists(expanded(name)) or glob.has_magic(name):
        return files
    if instead := removed(f"source {source}"):
        raise DataError(f"There is no source named {source!r} any more.", fix=instead)
    known = sorted({*DATASETS.names(), *SOURCES.names()} - {"files"})
    here = (entry.name for entry in Path().iterdir())
    guess = name_for("dataset", name, known) or nearest(name, [*known, *here])
    hint = f"Did you mean {guess!r}? " if guess else ""
    raise DataError(
        f"There is no file, source or dataset named {name!r}.",
        fix=f"{hint}Sources and datasets: {', '.join(known)}.",
    )


def _parameters(text: str, source: str, name: str) -> Parameters:
    """Return the parameters in `split=train,revision=main`, after a `name` if the source has one.

    Values are YAML, unless the source takes a text.
    """
    takes = inspect.signature(SOURCES.get(source)).parameters
    texts = {one for one in takes if takes[one].annotation in ("str", "str | None")}
    parameters: dict[str, Any] = {}
    first, _, others = text.partition(":")
    if "name" in takes and first and "=" not in first:  # ORG/NAME:split=train
        parameters["name"], text = first, others
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise DataError(
                f"{name!r}: {item!r} is not a parameter.",
                fix="Write NAME:key=value,key=value, for example hub:ORG/NAME:split=train.",
            )
        key = key.strip()
        try:
            parameters[key] = value if key in texts else parse_yaml(value, name=name)
        except ConfigError as error:
            raise DataError(f"{name!r}: {item!r} cannot be parsed.", fix=error.fix) from error
    return parameters


def in_both_splits(corpus: Corpus) -> str | None:
    """Return the first validation file or source that is also training text. None if there is none.

    Local files are compared by content, whatever their names, remote files by URL, and other
    sources by fingerprint.
    """
    if corpus.validation is None:
        return None
    train, val = corpus.read_tasks, corpus.validation.read_tasks
    known = {task.fingerprint for task in train if not task.files} - {""}
    again = (task.fingerprint for task in val if task.fingerprint in known)
    files = ([file for task in tasks for file in task.files] for tasks in (train, val))
    return shared_file(*files) or next(again, None)
