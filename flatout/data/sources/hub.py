"""Hugging Face datasets by name, streamed by the package `datasets`.

A dataset is named as `hub:ORG/NAME:config=...,split=...,revision=...`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from flatout.config.registry import nearest
from flatout.data.conversation.rendering import Renderer
from flatout.data.sources import ReadTask, Row
from flatout.data.sources.fields import Fields, document
from flatout.data.sources.packed import import_package
from flatout.errors import DataError, in_shell


def hub(
    name: str,
    config: str | None = None,
    split: str = "train",
    revision: str = "main",
    text_field: str = "text",
    mask_field: str | None = None,
    chat: Renderer | None = None,
) -> list[ReadTask]:
    """Return the tasks of a dataset, one per shard, all at the current commit of `revision`.

    `chat` writes rows of chat data as text.

    Raises: DataError when there is no such dataset, configuration, split or field, with a list of
            those that exist; MissingPackage.
    """
    commit = _commit(name, revision)
    stream = _stream(name, config, split, commit)
    columns = list(stream.column_names or [])
    fields = Fields(text_field, mask_field, chat)
    _check_fields(f"{name}, {split}", columns, fields.among(columns) if columns else fields)
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

    Raises: DataError when reading fails: the rest of the shard is unknown, so it is not a bad row.
    """
    stream = _stream(name, config, split, commit)
    where, number = f"{name}, {split}, shard {shard}", 0
    try:
        rows = stream.shard(num_shards=stream.num_shards, index=shard)
        for number, row in enumerate(rows, 1):
            yield document(row, fields, f"{where}, row {number}")
    except Exception as error:  # every reader has its own family of errors
        message = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise DataError(
            f"{where} cannot be read after row {number}: {message}.",
            fix="Run the same command again.",
        ) from error


def _commit(name: str, revision: str) -> str:
    """Return the commit of a revision, because a branch may move while its shards are read."""
    huggingface_hub = import_package("huggingface_hub", f"hub:{name}", extra="hub")
    try:
        return str(huggingface_hub.HfApi().dataset_info(name, revision=revision).sha)
    except Exception as error:  # network errors come from the HTTP library
        raise _cannot_open(name, f"at revision {revision}", error) from error


@cache
def _stream(name: str, config: str | None, split: str, commit: str) -> Any:
    datasets = import_package("datasets", f"hub:{name}", extra="hub")
    options = {"split": split, "revision": commit, "streaming": True}
    try:
        # Without it, `datasets` may ask whether to run a script in the repository.
        return datasets.load_dataset(name, config, **options, trust_remote_code=False)
    except Exception as error:  # ValueError for a configuration or a split; network errors
        raise _cannot_open(
            name, f"with configuration {config or 'default'} and split {split}", error
        ) from error


def _cannot_open(name: str, which: str, error: Exception) -> DataError:
    message = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return DataError(
        f"The dataset {name} {which} cannot be opened: {message}.",
        fix="Check the name. Write it as hub:ORG/NAME:config=...,split=...,revision=....",
    )


def _check_fields(dataset: str, columns: list[str], fields: Fields) -> None:
    """Reject a field that is not a column, if the columns are known before a row is read."""
    for field, option in fields.named:
        if not columns or field in columns or field.partition(".")[0] in columns:
            continue
        guess = nearest(field, columns)
        hint = f"Did you mean {option} {in_shell(guess)}? " if guess else ""
        raise DataError(
            f"{dataset} has no field {field!r}.", fix=f"{hint}Its fields are: {', '.join(columns)}."
        )
