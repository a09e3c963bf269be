"""Hugging Face datasets by name: their Parquet files, which the hub makes of every public dataset.

A dataset is named as `hub:ORG/NAME:config=...,split=...,revision=...`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flatout.config.registry import nearest
from flatout.data.sources import ReadTask
from flatout.data.sources.fields import TEXT_FIELD, Fields
from flatout.data.sources.files import tasks_of
from flatout.data.sources.listing import InputFile
from flatout.data.sources.packed import import_package
from flatout.errors import DataError
from flatout.storage.streams import shortened

MAIN, CONVERTED = "main", "refs/convert/parquet"
"""The branch that a dataset is named by, and the one in which the hub converts it."""
_FILE = re.compile(
    r"((?P<config>.+)/)?(?P<partial>partial-)?(?P<split>[A-Za-z_][\w.]*?)(/\d+|-\d+-of-\d+(-\w+)?)?\.parquet"
)
"""A file of a split: CONFIG/SPLIT/0000.parquet where the hub converted it, or data/ or CONFIG/ and
SPLIT-00000-of-00002.parquet where its owner wrote it."""
_DEFAULT = "default"


def hub(
    name: str,
    config: str | None = None,
    split: str = "train",
    revision: str = MAIN,
    fields: Fields = TEXT_FIELD,
) -> list[ReadTask]:
    """Return the tasks of a split of a dataset, all at the current commit.

    `revision` is a branch or a commit with Parquet files. By default, the files that the hub
    converted are read, and of their rows the `fields`.

    Raises: DataError when there is no such dataset, configuration or split, with a list of those
            that exist; MissingPackage.
    """
    commit, paths = _files(name, revision)
    matches = [match for path in sorted(paths) if (match := _FILE.fullmatch(path))]
    config = _one_of(name, "config", config, {_config_of(match) for match in matches})
    matches = [match for match in matches if _config_of(match) == config]
    _one_of(name, "split", split, {match["split"] for match in matches})
    matches = [match for match in matches if match["split"] == split]
    root = f"hf://datasets/{name}@{commit}"
    if matches[0]["partial"]:
        raise DataError(
            f"The hub has converted only the beginning of {name}, {split} to Parquet.",
            fix=f"Name the files of its repository, for example 'hf://datasets/{name}/**/*.jsonl'.",
        )
    urls = [f"{root}/{match[0]}" for match in matches]
    found = [InputFile(url, url, 0) for url in urls]
    mark = f"hub {name} {config} {split} {commit}"
    return [
        replace(task, fingerprint="" if index else mark, files=())
        for index, task in enumerate(tasks_of(found, fields))
    ]


SOURCE = hub


def _files(name: str, revision: str) -> tuple[str, list[str]]:
    """Return the commit of a revision, because a branch may move, and the files there."""
    library = import_package("huggingface_hub", f"hub:{name}", extra="hub")
    import_package("pyarrow", f"hub:{name}", extra="hub")
    errors = import_package("huggingface_hub.errors", f"hub:{name}", extra="hub")
    api = library.HfApi()
    try:
        info: Any = None
        if revision == MAIN:
            with suppress(errors.RevisionNotFoundError):
                info = api.dataset_info(name, revision=CONVERTED)
        info = info or api.dataset_info(name, revision=revision)
    except Exception as error:  # network errors come from the HTTP library
        message = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise DataError(
            f"The dataset {name} at revision {revision} cannot be opened: {message}.",
            fix="Check the name. Write it as hub:ORG/NAME:config=...,split=...,revision=....",
        ) from error
    return str(info.sha), [file.rfilename for file in info.siblings or ()]


def _config_of(match: re.Match[str]) -> str:
    return _DEFAULT if match["config"] in (None, "data") else match["config"]


def _one_of(name: str, key: str, wanted: str | None, known: Iterable[str]) -> str:
    """Return the wanted configuration or split, or the default one.

    Raises: DataError when there is no such one, or several to choose from.
    """
    names = sorted(known)
    if not names:
        raise DataError(
            f"The dataset {name} has no Parquet files.",
            fix=f"Name the files of its repository, for example 'hf://datasets/{name}/**/*.jsonl'.",
        )
    if wanted is None and (len(names) == 1 or _DEFAULT in names):
        return names[0] if len(names) == 1 else _DEFAULT
    if wanted in names:
        return wanted
    guess = nearest(wanted or "", names) or names[0]
    raise DataError(
        f"The dataset {name} has no {key} {wanted!r}."
        if wanted
        else f"The dataset {name} has several configurations.",
        fix=f"Add {key}={guess}, or a different one of: {shortened(names, 20)}.",
    )
