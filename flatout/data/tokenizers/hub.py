"""Finds the tokenizer files of a Hugging Face repository in the local cache, or downloads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from flatout.errors import DataError, MissingPackage
from flatout.progress import SILENT, Progress

_REPOSITORY = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII
)
_FILE_ENDINGS = (".json", ".tiktoken", ".model", ".gz")
_LACKING = ("EntryNotFoundError", "RemoteEntryNotFoundError")
"""Errors of huggingface_hub for a file that a repository does not have."""


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
    if find_spec("huggingface_hub") is None:
        raise MissingPackage(
            f"The tokenizer {name} is on the Hugging Face hub, but huggingface_hub is not "
            "installed.",
            fix="Install it with `pip install huggingface_hub`, or name a tokenizer.json file.",
        )
    found = _file(name, "tokenizer.json", cache, endpoint, progress)
    if isinstance(found, Exception):
        raise _explained(found, name) from found
    return found


def repository_file(
    name: str,
    filename: str,
    *,
    otherwise: str = "",
    cache: Path | None = None,
    endpoint: str | None = None,
    progress: Progress = SILENT,
) -> Path | None:
    """Return the local path of another small file of a repository whose tokenizer was found.

    None when the repository lacks it, which is cached too, or the hub cannot be reached and the
    file does not matter. If it does, `otherwise` says how to do without it.

    Raises: DataError if it matters, and the hub cannot be reached.
    """
    found = _file(name, filename, cache, endpoint, progress)
    if isinstance(found, Path):
        return found
    if otherwise and type(found).__name__ not in _LACKING:
        raise DataError(
            f"It is not known whether {name} has a {filename}: it is not in the cache, and the hub "
            "cannot be reached.",
            fix=f"Check the connection, then run it again. Or {otherwise}.",
        ) from found
    return None


def _file(
    name: str, filename: str, cache: Path | None, endpoint: str | None, progress: Progress
) -> Path | Exception:
    """Return the local path of a file, or the error of huggingface_hub."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    match = _REPOSITORY.fullmatch(name)
    assert match is not None, "the caller has checked is_repository"
    repository, revision = match["repository"], match["revision"]
    cached = try_to_load_from_cache(repository, filename, cache_dir=cache, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    if cached is not None:
        return EntryNotFoundError(filename)
    try:
        with progress.task(f"Looking for {filename} of {name}"):
            found = hf_hub_download(
                repository, filename, revision=revision, cache_dir=cache, endpoint=endpoint
            )
        return Path(str(found))
    except (OSError, EntryNotFoundError) as error:
        return error


def _explained(error: Exception, name: str) -> DataError:
    """Return the error to report for an exception of huggingface_hub."""
    own = {
        "LocalEntryNotFoundError": (
            f"There is no file {name}, {name} is not in the cache, and the hub cannot be reached.",
            "Check the name and the connection, or name a tokenizer.json file.",
        ),
        "EntryNotFoundError": (
            f"{name} has no tokenizer.json.",
            "Name a repository that has one, or a tokenizer file.",
        ),
    }
    what, fix = hub_problem(error, name, own)
    return DataError(what, fix=fix)


def hub_problem(
    error: Exception, name: str, own: Mapping[str, tuple[str, str]] | None = None
) -> tuple[str, str]:
    """Return what an exception of huggingface_hub says of a repository, and the fix.

    `own` has other answers by the names of exceptions.
    """
    answers = {
        "GatedRepoError": (
            f"{name} is gated: only users whom its owners approve can read it.",
            "Request access on its page, then run `hf auth login`.",
        ),
        "RevisionNotFoundError": (
            f"{name} has no such revision.",
            "Name a branch, a tag or a full commit hash after the @.",
        ),
        "RepositoryNotFoundError": (
            f"There is no repository {name} on the hub that you may read.",
            "Check the name, or run `hf auth login`.",
        ),
        **(own or {}),
    }
    reason = " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
    unknown = f"Cannot download {name}: {reason}.", "Check the connection, then run it again."
    kinds = (kind.__name__ for kind in type(error).__mro__)
    return next((answers[kind] for kind in kinds if kind in answers), unknown)
