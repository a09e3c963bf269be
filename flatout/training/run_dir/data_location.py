"""The dataset of a run that resumes: its path may have changed, its mix and tokenizer may not."""

from __future__ import annotations

from pathlib import Path

from flatout.config.sections import DataConfig
from flatout.data.conversation.templates import CHAT_TEMPLATE, stored_template
from flatout.data.store.manifest import TOKENIZER
from flatout.data.store.mix import AnyDataset, members_of, whole_turns
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import (
    RESTORE,
    NotEncodable,
    load_tokenizer,
    stored_digest,
    stored_files,
)
from flatout.errors import CheckpointError, in_shell
from flatout.progress import SILENT, Progress
from flatout.storage.files import copy_whole, expanded, write_text
from flatout.storage.json_io import JsonObject, parsing
from flatout.training.checkpoint import catalog

COMPARED = (
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x + 1\n",
    "Caf\u00e9, 1984: 3.14 \u65e5\u672c\u8a9e \U0001f600",
)
"""Texts whose tokens distinguish tokenizers."""


def moved_data(known: DataConfig, requested: DataConfig) -> JsonObject:
    """Return the config values of the data's present paths.

    Empty when the data is not a single dataset as before, or not the same mix. The datasets of a
    mix are recognised by their paths, or, if those have changed, by their order, which is part of
    what a run reads.
    """
    if known.path is not None and requested.path is not None:
        return located(requested)
    if known.mix is None or requested.mix is None:
        return {}
    before, now = _turns_by_path(known.mix), _turns_by_path(requested.mix)
    if before == now:
        return {"data.mix": known.mix}
    return located(requested) if list(before.values()) == list(now.values()) else {}


def _turns_by_path(mix: dict[str, float]) -> dict[str, int]:
    paths = (str(Path(path).resolve()) for path in mix)
    return dict(zip(paths, whole_turns(mix), strict=True))


def located(data: DataConfig) -> JsonObject:
    """Return the config values of the data with absolute paths, for use from any directory."""
    if data.mix is None:
        return {"data.path": str(expanded(data.path or "").absolute())}
    return {"data.mix": {str(expanded(path).absolute()): n for path, n in data.mix.items()}}


def data_facts(dataset: AnyDataset) -> list[JsonObject]:
    """Return what identifies the training tokens of each dataset, and how many there are."""
    return [
        {
            "path": str(part.dataset.path.absolute()),
            "vocab_size": part.dataset.manifest.vocab_size,
            "tokens": part.dataset.manifest.splits["train"].tokens,
            "documents": part.dataset.manifest.splits["train"].documents,
            "digest": part.dataset.manifest.digest_of("train"),
        }
        for part in members_of(dataset)
    ]


def keep_text_format(dataset: AnyDataset, run_folder: Path, *, progress: Progress = SILENT) -> None:
    """Copy the tokenizer and the chat template, so that a model generates text without its data."""
    members = members_of(dataset)
    for path in reversed(stored_files(members[0].dataset.path / TOKENIZER)):
        copy_whole(path, run_folder / path.name)
    templates = [
        template
        for member in members
        if (template := stored_template(member.dataset.manifest.source)) is not None
    ]
    if not templates:
        return
    write_text(run_folder / CHAT_TEMPLATE, templates[0].model_dump_json(indent=1) + "\n")
    if any(not template.writes_as(templates[0]) for template in templates):
        progress.say(
            "The conversations of this mix have different chat templates. `flatout chat` will use "
            f"the first one, {templates[0].name}."
        )


def require_tokenizer(
    run_folder: Path, dataset: AnyDataset, checkpoint: Path | None = None
) -> None:
    """Check that the dataset has the tokenizer with which the run was trained.

    If `checkpoint` is given, the tokenizer that it names counts.
    Raises: CheckpointError when the tokenizers differ, or the run's copy of its tokenizer is
            damaged.
    """
    kept, data = run_folder / TOKENIZER, members_of(dataset)[0].dataset
    found = stored_digest(kept) if kept.exists() else None
    known = (catalog.tokenizer_of(checkpoint) if checkpoint is not None else None) or found
    if found not in (known, None):
        raise CheckpointError(
            f"{kept} is damaged or was replaced: the model was trained with a different tokenizer.",
            fix=RESTORE,
        )
    if known not in (data.manifest.tokenizer.digest, None):
        raise CheckpointError(
            f"{data.path} was prepared with a different tokenizer than the one {run_folder} was "
            "trained with.",
            fix=f"Prepare the text with --tokenizer {in_shell(kept)}.",
        )


def require_same_data(run_folder: Path, dataset: AnyDataset, checkpoint: Path) -> None:
    """Check that the training tokens are those that a run's own checkpoint was trained on.

    Paths may differ, and validation tokens may: `load` reports those.
    Raises: CheckpointError naming the datasets that have changed, and how.
    """
    with parsing(checkpoint / catalog.STATE):
        known = catalog.recorded_environment(checkpoint)["datasets"]
        pairs = zip(known, data_facts(dataset), strict=True)
        changed = [_change(old, new) for old, new in pairs if old["digest"] != new["digest"]]
    if changed:
        raise CheckpointError(
            f"The training tokens of {run_folder} have changed since {checkpoint.name} was "
            f"written: {'; '.join(changed)}.",
            fix="Restore the dataset, or name its new path (data.path=PATH). To train on different "
            f"tokens on purpose, start a new run: --resume {in_shell(run_folder)} --run-dir DIR.",
        )


def _change(old: JsonObject, new: JsonObject) -> str:
    """Return how the training tokens of one dataset have changed."""
    counts = [
        f"{name} {old[name]:,} -> {new[name]:,}"
        for name in ("tokens", "documents")
        if old[name] != new[name]
    ]
    moved = f" (before: {old['path']})" if old["path"] != new["path"] else ""
    what = ", ".join(counts) or f"as many other tokens (digest {old['digest']} -> {new['digest']})"
    return f"{new['path']}{moved}: {what}"


def require_tokenizer_of(folder: Path, data: Dataset, *, progress: Progress = SILENT) -> None:
    """Check that a dataset's tokenizer gives the ids of the tokenizer.json of a base model.

    Equal tokenizers may have different files, so a few texts are compared.
    Raises: CheckpointError when the ids differ; DataError when the file cannot be used.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        progress.say(
            f"There is no tokenizer.json in {folder}: it cannot be compared with the data's."
        )
        return
    theirs, ours = load_tokenizer(path), load_tokenizer(data.path / TOKENIZER)
    for text in COMPARED:
        try:
            expected = ours.encode(text)
        except NotEncodable:
            continue
        if theirs.encode(text) != expected:
            raise CheckpointError(
                f"{data.path} was prepared with a different tokenizer than {path}, that of the "
                f"base model: {text[:20]!a} has other tokens.",
                fix=f"Prepare the text with --tokenizer {in_shell(path)}.",
            )
