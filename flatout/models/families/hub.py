"""Download a model of the Hugging Face hub: its config.json, weights and tokenizer, no code."""

from __future__ import annotations

import re
from pathlib import Path

from flatout.data.tokenizers.hub import hub_problem
from flatout.errors import CheckpointError, MissingPackage
from flatout.models.families.files import INDEX, SAFETENSORS, WEIGHTS
from flatout.progress import SILENT, Progress

PREFIX = "hf:"
_REFERENCE = re.compile(
    r"hf:(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII
)
CONFIG = "config.json"
SMALL = (
    CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that are downloaded if they exist, beside the weights."""


def model_folder(
    reference: str,
    *,
    whole: bool,
    cache: Path | None = None,
    endpoint: str | None = None,
    progress: Progress = SILENT,
) -> Path:
    """Return the local directory of `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`.

    All files are of one commit. Without `whole`, only config.json is downloaded. What was
    downloaded before is used without the hub if it cannot be reached. `cache` and `endpoint`
    default to those of huggingface_hub.

    Raises: CheckpointError when there is no such repository or revision, or the hub cannot be
            reached; MissingPackage.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise CheckpointError(
            f"train.init_from={reference} does not name a repository of the Hugging Face hub.",
            fix="Write hf:ORG/NAME, or hf:ORG/NAME@REVISION with a branch, a tag or a commit.",
        )
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise MissingPackage(
            f"Downloading {reference} needs the package huggingface_hub, which is not installed.",
            fix='Install it: `pip install "flatout[hub]"`, or download the model, and name its '
            "directory.",
        ) from error
    repository, revision = match["repository"], match["revision"] or "main"
    try:
        info = hub.HfApi(endpoint=endpoint).model_info(repository, revision=revision)
    except Exception as error:  # of huggingface_hub, or of the HTTP library that it uses
        known = hub.try_to_load_from_cache(repository, CONFIG, revision=revision, cache_dir=cache)
        if not isinstance(known, str) or isinstance(error, HfHubHTTPError):  # the hub has answered
            raise _explained(error, reference) from error
        folder = Path(known).parent
        progress.say(f"The hub cannot be reached. Using the copy of {repository} in {folder}.")
        return folder
    listed = [sibling.rfilename for sibling in info.siblings or ()]
    wanted = wanted_files(listed) if whole else [CONFIG]
    if CONFIG not in listed:
        raise CheckpointError(
            f"{reference} has no {CONFIG}, so its architecture is not known.",
            fix="Name a repository in the format of transformers.",
        )
    with progress.task(f"Downloading {repository}"):
        try:
            found = hub.snapshot_download(
                repository,
                revision=info.sha,
                allow_patterns=wanted,
                cache_dir=cache,
                endpoint=endpoint,
            )
        except Exception as error:
            raise _explained(error, reference) from error
    return Path(found)


def wanted_files(listed: list[str]) -> list[str]:
    """Return the files of a repository to download: the weights that are read, and no code."""
    name = next((name for name in WEIGHTS if name in listed), "")
    if name.endswith(INDEX):
        stem, ending = name.removesuffix(INDEX).rsplit(".", 1)
        parts = re.compile(rf"{stem}[\w.-]*\.{ending}", re.ASCII)
        weights = [name, *filter(parts.fullmatch, listed)]
    else:
        others = [one for one in listed if one.endswith(SAFETENSORS) and "/" not in one]
        weights = [name] if name else [one for one in others if one[:5] == "model"] or others
    return [*(one for one in SMALL if one in listed and one != CONFIG), CONFIG, *weights]


def _explained(error: Exception, reference: str) -> CheckpointError:
    """Return the error to report for an exception of huggingface_hub."""
    what, fix = hub_problem(error, reference.removeprefix(PREFIX))
    return CheckpointError(what, fix=fix)
