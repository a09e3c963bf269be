"""Upload an export to a repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from flatout.errors import ConfigError, FlatoutError, RunFailed
from flatout.progress import SILENT, Progress

LOGIN = "Run `hf auth login` with a token that may write, or set HF_TOKEN."


def push_folder(
    folder: Path,
    repository: str,
    *,
    private: bool,
    message: str,
    endpoint: str | None = None,
    progress: Progress = SILENT,
) -> str:
    """Upload a directory as one commit, and return the commit's URL.

    The repository is created if it does not exist. `endpoint` defaults to that of huggingface_hub.

    Raises: ConfigError when the hub rejects the name or the token; RunFailed when it cannot be
            reached.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, library_name="flatout")
    try:
        with progress.task(f"Uploading to {repository}"):
            api.create_repo(repository, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=message
            )
    except Exception as error:  # of huggingface_hub, or of the HTTP library that it uses
        raise _explained(error, repository) from error
    return str(commit.commit_url)


def _explained(error: Exception, repository: str) -> FlatoutError:
    """Return the error to report for an exception of huggingface_hub."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.LocalTokenNotFoundError) or status == 401:
        return ConfigError(f"Pushing to {repository} needs a token of the hub.", fix=LOGIN)
    if status == 403:
        return ConfigError(f"Your token may not write to {repository}.", fix=LOGIN)
    if isinstance(error, errors.HFValidationError) or status == 400:
        return ConfigError(
            f"The hub rejects {repository}: {_reason(error)}.",
            fix="Name a repository as ORG/NAME: letters, digits, dashes, underscores and dots.",
        )
    return RunFailed(
        f"Cannot push to {repository}: {_reason(error)}.",
        fix="Check the connection, then run the same command again.",
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
