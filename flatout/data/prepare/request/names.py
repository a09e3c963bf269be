"""A SOURCE argument: a path, a glob, a URL, standard input, a card, or a registered source."""

from __future__ import annotations

import glob
import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from flatout.cache import default_cache
from flatout.conversation.rendering import Renderer
from flatout.data.prepare.request.cards import load_card
from flatout.data.prepare.request.options import Options
from flatout.data.prepare.request.standard_input import spool_standard_input
from flatout.documents import parse_yaml
from flatout.errors import ConfigError, DataError
from flatout.files import expanded
from flatout.progress import SILENT, Progress
from flatout.registry import DATASETS, SOURCES, nearest
from flatout.remote.download import check_file, download
from flatout.remote.urls import is_url
from flatout.sources import ReadTask, read_tasks_of
from flatout.words import name_for

STANDARD_INPUT = "-"

Parameters = Mapping[str, object]


@dataclass(frozen=True)
class SourceReader:
    """Opens the sources that a prepare names, all with the same options."""

    options: Options
    from_file: str | None = None
    """A local copy of the card's file, used instead of downloading it."""
    cache: Path = field(default_factory=default_cache)
    spool: Path | None = None
    """Directory for standard input; None uses the system's temporary directory."""
    progress: Progress = SILENT
    chat: Renderer | None = None
    """Writes conversations as text, when rows are conversations."""

    @property
    def fields(self) -> Parameters:
        """The options that are set and that a source may accept."""
        options = self.options
        fields = {
            "mask_field": options.mask_field,
            "text_field": options.text_field,
            "include": options.include or None,
            "encoding": options.encoding,
            "chat": self.chat,
        }
        return {key: value for key, value in fields.items() if value is not None}

    def card(self, name: str) -> list[ReadTask]:
        """Return the read tasks of a card, whose file is downloaded unless it is in the cache."""
        card = load_card(name)
        fields = {**card.fields, **self.fields}
        if self.from_file is None and Path(name).exists():
            self.progress.say(
                f"{name} is the dataset card of that name; write ./{name} to use the local file "
                "or directory."
            )
        if card.url is None or card.sha256 is None:
            assert card.files is not None
            if self.from_file is not None:
                raise DataError(
                    f"{name} is not a single file, so --from cannot replace it.",
                    fix=f"Name your copies of {card.files} as the source.",
                )
            return source_tasks(card.source, {"path": card.url_of(card.files)}, fields)
        if self.from_file is not None:
            file = expanded(self.from_file)
            check_file(file, card.sha256)
        else:
            file = download(
                card.url,
                self.cache.expanduser() / name / card.url.rpartition("/")[2],
                sha256=card.sha256,
                num_bytes=card.num_bytes,
                progress=self.progress,
            )
        tasks = source_tasks(card.source, {"path": str(file)}, fields)
        return _with_fingerprint(tasks, f"{name} {card.sha256}")

    def text(self, name: str) -> list[ReadTask]:
        """Return the read tasks of a source that is not a card."""
        if name == STANDARD_INPUT:
            file, sha256 = spool_standard_input(
                self.spool, encoding=self.options.encoding, progress=self.progress
            )
            tasks = source_tasks("files", {"path": str(file)}, self.fields)
            return _with_fingerprint(tasks, f"standard input {sha256}")
        return source_tasks(*_source_and_parameters(name), self.fields)


def source_tasks(name: str, parameters: Parameters, fields: Parameters) -> list[ReadTask]:
    """Return the read tasks of a source, called with its parameters and the fields it accepts.

    Raises: DataError for a field that a source without rows, or without files, does not accept.
    """
    source = SOURCES.get(name)
    accepted = inspect.signature(source).parameters
    for key, value in fields.items():
        if key not in accepted:
            option = f"--{key.replace('_', '-')}"
            why = (
                f"has no rows, so it has no field {value!r}"
                if key.endswith("_field")
                else f"does not read your files, so {option} has no effect"
            )
            raise DataError(f"The source {name!r} {why}.", fix=f"Leave {option} out.")
    return read_tasks_of(source, name, {**fields, **parameters})


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
        first, _, others = rest.partition(":")
        if "name" in inspect.signature(SOURCES.get(key)).parameters and first and "=" not in first:
            return key, {"name": first, **_parameters(others, name)}  # ORG/NAME:split=train
        return key, _parameters(rest, name)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(:.*)?", name) and not os.path.exists(name):
        module, function, *given = name.split(":", 2)
        return f"{module}:{function}", _parameters(given[0] if given else "", name)
    if "/" in name or Path(name).suffix or os.path.exists(expanded(name)) or glob.has_magic(name):
        return files
    known = sorted({*DATASETS.names(), *SOURCES.names()} - {"files"})
    here = (entry.name for entry in Path().iterdir())
    guess = name_for("dataset", name, known) or nearest(name, [*known, *here])
    hint = f"Did you mean {guess!r}? " if guess else ""
    raise DataError(
        f"There is no file, source or dataset named {name!r}.",
        fix=f"{hint}Sources and datasets: {', '.join(known)}.",
    )


def _parameters(text: str, name: str) -> dict[str, object]:
    """Return the parameters in `documents=1000,seed=0`."""
    parameters: dict[str, object] = {}
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
            raise DataError(f"{name!r}: {item!r} cannot be parsed.", fix=error.fix) from error
    return parameters
