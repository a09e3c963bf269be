"""Finds the tokenizer files of a Hugging Face repository in the local cache, or downloads them."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from flatout.errors import DataError, MissingPackage
from flatout.progress import SILENT, Progress

_REPOSITORY = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII
)
_FILE_ENDINGS = (".json", ".tiktoken", ".model", ".gz")


def is_repository(name: str) -> bool:
    """Return whether a name looks like `ORG/NAME` or `ORG/NAME@REVISION`, not like a file."""
    return _REPOSITORY.fullmatch(name) is not None and not name.endswith(_FILE_ENDINGS)


def tokenizer_file(
    name: str,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
    progress: Progress = SILENT,
) -> Path:
    """Return the local path of a repository's tokenizer.json.

    A cached file is used without contacting the hub. `cache` and `endpoint` default to those of
    huggingface_hub.

    Raises: MissingPackage; DataError when the repository, revision or file does not exist, or the
            hub cannot be reached.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingPackage(
            f"The tokenizer {name} is on the Hugging Face hub, but huggingface_hub is not "
            "installed.",
            fix="Install it with `pip install huggingface_hub`, or name a tokenizer.json file.",
        ) from error
    match = _REPOSITORY.fullmatch(name)
    assert match is not None, "the caller has checked is_repository"

    def download(local_files_only: bool) -> Path:
        path = hf_hub_download(
            match["repository"],
            "tokenizer.json",
            revision=match["revision"],
            cache_dir=cache,
            endpoint=endpoint,
            local_files_only=local_files_only,
        )
        return Path(str(path))

    with suppress(LocalEntryNotFoundError):  # if it is not cached, ask the hub
        return download(local_files_only=True)
    try:
        with progress.task(f"Downloading the tokenizer of {name}"):
            return download(local_files_only=False)
    except (OSError, EntryNotFoundError) as error:
        raise _explained(error, name, match["repository"], match["revision"]) from error


def repository_file(
    name: str,
    filename: str,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
    progress: Progress = SILENT,
) -> Path | None:
    """Return the local path of another small file of a repository whose tokenizer was found.

    None when the repository lacks it, which is cached too, or the hub cannot be reached.
    """
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    match = _REPOSITORY.fullmatch(name)
    assert match is not None, "the caller has checked is_repository"
    repository, revision = match["repository"], match["revision"]
    cached = try_to_load_from_cache(repository, filename, cache_dir=cache, revision=revision)
    if cached is _CACHED_NO_EXIST:
        return None
    if isinstance(cached, str):
        return Path(cached)
    with suppress(OSError, EntryNotFoundError), progress.task(f"Looking for {filename} of {name}"):
        found = hf_hub_download(
            repository, filename, revision=revision, cache_dir=cache, endpoint=endpoint
        )
        return Path(str(found))
    return None


def _explained(error: Exception, name: str, repository: str, revision: str | None) -> DataError:
    """Return the error to report for an exception of huggingface_hub."""
    from huggingface_hub import errors

    where = f"{repository}{f' at revision {revision}' if revision else ''}"
    answers = {  # subclasses first
        errors.GatedRepoError: (
            f"{where} is gated: only users whom its owners approve can read it.",
            "Request access on its page, then run `hf auth login`.",
        ),
        errors.RepositoryNotFoundError: (
            f"There is no file {name}, and no repository {repository} on the hub that you may "
            "read.",
            "Check the name, or run `hf auth login`.",
        ),
        errors.RevisionNotFoundError: (
            f"{repository} has no revision {revision}.",
            "Name a branch, a tag or a full commit hash after the @.",
        ),
        errors.LocalEntryNotFoundError: (
            f"There is no file {name}, {where} is not in the cache, and the hub cannot be reached.",
            "Check the name and the connection, or name a tokenizer.json file.",
        ),
        errors.EntryNotFoundError: (
            f"{where} has no tokenizer.json.",
            "Name a repository that has one, or a tokenizer file.",
        ),
    }
    for kind, (what, fix) in answers.items():
        if isinstance(error, kind):
            return DataError(what, fix=fix)
    return DataError(
        f"Cannot download the tokenizer of {where}: {error}.",
        fix="Check the connection, then run it again.",
    )
