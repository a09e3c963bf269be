"""A Hugging Face data set by its name, streamed by the package datasets:
`hub:ORG/NAME:config=...,split=...,revision=...`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

from flatout.errors import DataError, MissingPackage, in_shell
from flatout.registry import nearest
from flatout.sources import ReadTask, Row
from flatout.sources.fields import Fields, document

_INSTALL = 'Install it: `pip install "flatout[hub]"`.'


def hub(
    name: str,
    config: str | None = None,
    split: str = "train",
    revision: str = "main",
    text_field: str = "text",
    mask_field: str | None = None,
) -> list[ReadTask]:
    """Return the parts of a data set, one a shard, all of the commit that `revision` is now.

    Raises: DataError when there is no such data set, configuration, split or field, naming those
            there are; MissingPackage.
    """
    commit = _commit(name, revision)
    stream = _stream(name, config, split, commit)
    fields = Fields(text_field, mask_field)
    _check_fields(f"{name}, {split}", list(stream.column_names or []), fields)
    mark = f"hub {name} {config} {split} {commit}"
    return [
        ReadTask(
            read_shard, (name, config, split, commit, shard, fields), mark if shard == 0 else ""
        )
        for shard in range(stream.num_shards)
    ]


SOURCE = hub


def read_shard(
    name: str, config: str | None, split: str, commit: str, shard: int, fields: Fields
) -> Iterator[Row]:
    """Yield the documents of one shard.

    Raises: DataError when it breaks off: what comes after is unknown, so it is no bad row.
    """
    stream = _stream(name, config, split, commit)
    rows = iter(stream.shard(num_shards=stream.num_shards, index=shard))
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # each of its readers has errors of its own
            said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise DataError(
                f"{_place(name, split, shard)} breaks off after row {number}: {said}.",
                fix="Run it again.",
            ) from error
        number += 1
        where = f"{_place(name, split, shard)}, row {number}"
        yield document(row, fields, where)


def _place(name: str, split: str, shard: int) -> str:
    return f"{name}, {split}, shard {shard}"


def _commit(name: str, revision: str) -> str:
    """Return the commit that a revision is now: a branch may move while its shards are read."""
    huggingface_hub = _package("huggingface_hub", name)
    try:
        return str(huggingface_hub.HfApi().dataset_info(name, revision=revision).sha)
    except Exception as error:  # those of the network are the HTTP library's own
        raise _absent(name, f"at revision {revision}", error) from error


@cache
def _stream(name: str, config: str | None, split: str, commit: str) -> Any:
    datasets = _package("datasets", name)
    options = {
        "split": split,
        "revision": commit,
        "streaming": True,
        "trust_remote_code": False,
    }  # else a script in the repository may ask to run
    try:
        return datasets.load_dataset(name, config, **options)
    except (
        Exception
    ) as error:  # ValueError for a configuration or a split, and what the network gives
        raise _absent(
            name, f"with configuration {config or 'default'} and split {split}", error
        ) from error


def _absent(name: str, which: str, error: Exception) -> DataError:
    said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return DataError(
        f"The data set {name} {which} cannot be had: {said}.",
        fix="Check the name; hub:ORG/NAME:config=...,split=...,revision=... says which.",
    )


def _check_fields(place: str, columns: list[str], fields: Fields) -> None:
    """Refuse a field that no row has, where the columns are known before a row is read."""
    for field, option in ((fields.text, "--text-field"), (fields.prompt, "--mask-field")):
        if field is None or not columns or field in columns or field.partition(".")[0] in columns:
            continue
        guess = nearest(field, columns)
        hint = f"Did you mean {option} {in_shell(guess)}? " if guess else ""
        raise DataError(
            f"{place} has no field {field!r}.", fix=f"{hint}Its fields are: {', '.join(columns)}."
        )


def _package(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackage(
            f"Reading hub:{name} takes the package {package}, which is not installed.", fix=_INSTALL
        ) from error
