"""The tokenizer.json of a repository of the Hugging Face hub: from the hub's cache on this machine,
else fetched into it.
"""

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
    """Return whether a name has the form of a repository, `ORG/NAME` or `ORG/NAME@REVISION`, and
    not of a file.
    """
    return _REPOSITORY.fullmatch(name) is not None and not name.endswith(_FILE_ENDINGS)


def tokenizer_file(
    name: str,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
    progress: Progress = SILENT,
) -> Path:
    """Return the tokenizer.json of a repository, on this machine.

    What the cache holds of that revision is taken without asking the hub. `cache` and `endpoint`
    are those of huggingface_hub unless stated.

    Raises: MissingPackage; DataError when there is no such repository, revision or file, or the hub
            cannot be reached.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise MissingPackage(
            f"The tokenizer {name} lies on the Hugging Face hub, and huggingface_hub is not installed.",
            fix="Install it with `pip install huggingface_hub`, or name a tokenizer.json file.",
        ) from error
    match = _REPOSITORY.fullmatch(name)
    assert match is not None, "only what is_repository accepts is asked for"
    repository, revision = match["repository"], match["revision"]

    def fetched(local_files_only: bool) -> Path:
        found = hf_hub_download(
            repository,
            "tokenizer.json",
            revision=revision,
            cache_dir=cache,
            endpoint=endpoint,
            local_files_only=local_files_only,
        )
        return Path(str(found))

    with suppress(LocalEntryNotFoundError):  # the cache may lack it: then the hub is asked
        return fetched(local_files_only=True)
    where = f"{repository}{f' at revision {revision}' if revision else ''}"
    try:
        with progress.task(f"Fetching the tokenizer of {where}"):
            return fetched(local_files_only=False)
    except GatedRepoError as error:
        raise DataError(
            f"{where} is only for those whom its owners let in.",
            fix="Ask on its page, then run `hf auth login`.",
        ) from error
    except RepositoryNotFoundError as error:
        raise DataError(
            f"There is no file {name} here and no repository {repository} on the hub that you may read.",
            fix="Check the name, or run `hf auth login`.",
        ) from error
    except RevisionNotFoundError as error:
        raise DataError(
            f"{repository} has no revision {revision}.",
            fix="Name a branch, a tag or a whole commit hash after the @.",
        ) from error
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"There is no file {name} here, the cache has no {where}, and the hub cannot be reached.",
            fix="Check the name and the connection, or name a tokenizer.json file.",
        ) from error
    except EntryNotFoundError as error:
        raise DataError(
            f"{where} has no tokenizer.json.",
            fix="Name a repository that has one, or a tokenizer file.",
        ) from error
    except OSError as error:
        raise DataError(
            f"The tokenizer of {where} could not be fetched: {error}.",
            fix="Check the connection, then run it again.",
        ) from error
