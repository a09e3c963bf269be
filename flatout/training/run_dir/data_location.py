"""The data of a run that goes on: it may have moved, its mix may not have changed, nor its
tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flatout.config.schema import DataConfig, RunConfig
from flatout.data.store.manifest import MANIFEST, TOKENIZER
from flatout.data.store.mix import MixedDataset, members_of, open_data, whole_turns
from flatout.data.store.remote import absolute_path_or_url
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import RESTORE, read_tokenizer
from flatout.errors import CheckpointError, in_shell
from flatout.files import read_json, understanding
from flatout.training.checkpoint import catalog
from flatout.training.run_dir import layout
from flatout.transfer.urls import is_url


def stored_config(place: Path, asked: RunConfig, *, trust_code: bool = False) -> RunConfig | None:
    """Return the configuration the run was begun with, on the data that is asked for now; None when
    there is no run yet.

    Data may be moved. Another tokenizer is refused, other tokens are said: `require_tokenizer`,
    `environment_of`.
    Raises: ConfigError when `asked` contradicts it, the sets of a mix and their weights included;
            UntrustedCode before that.
    """
    known = layout.read_config(place)
    if known is None:
        return None
    moved = _moved(known.data, asked.data)
    if moved is None:
        return layout.stored_config(place, asked, trust_code=trust_code)
    first = layout.read_asked(place) or known
    stored = layout.stored_config(
        place, asked.with_values(_where(first.data)), trust_code=trust_code
    )
    return stored.with_values(moved) if stored else None


def _moved(known: DataConfig, asked: DataConfig) -> dict[str, Any] | None:
    """Return where the data lies now; None when it is not one folder as before, or not the same
    mix.

    Sets of a mix are told by their folders, or, where those have changed, by their order: it
    belongs to what a run reads.
    """
    if known.path is not None and asked.path is not None:
        return {"data.path": absolute_path_or_url(asked.path)}
    if known.mix is None or asked.mix is None:
        return None
    before, now = _turns_by_place(known.mix), _turns_by_place(asked.mix)
    if before == now:
        return _where(known)
    if list(before.values()) == list(now.values()):
        return {"data.mix": absolute(asked.mix)}
    return None


def _turns_by_place(mix: dict[str, float]) -> dict[str, int]:
    places = (place if is_url(place) else str(Path(place).resolve()) for place in mix)
    return dict(zip(places, whole_turns(mix), strict=True))


def _where(data: DataConfig) -> dict[str, Any]:
    return {"data.path": data.path} if data.mix is None else {"data.mix": data.mix}


def absolute(mix: dict[str, float]) -> dict[str, float]:
    """Return a mix with absolute paths."""
    return {absolute_path_or_url(place): weight for place, weight in mix.items()}


def anywhere(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths of its data, so that a run can be scored from
    any folder.
    """
    if config.data.mix is not None:
        return config.with_values({"data.mix": absolute(config.data.mix)})
    return config.with_values({"data.path": absolute_path_or_url(config.data.path or "")})


def found_again(data: DataConfig, run_folder: Path, checkpoint: Path) -> DataConfig | None:
    """Return where data is now that was moved together with its run, as a project's folder that was
    renamed; None when it is not found.

    It is looked for by the end of its path in every folder above the run, and is the data that the
    checkpoint was trained on.
    """
    found = {
        place: place if _is_there(place) else _moved_with(place, run_folder)
        for place in _places(data)
    }
    if None in found.values():
        return None
    moved = data.model_copy(
        update={"mix": {found[place]: weight for place, weight in data.mix.items()}}
        if data.mix
        else {"path": found[data.path or ""]}
    )
    with understanding(checkpoint):
        trained_on = read_json(checkpoint / catalog.STATE)["environment"].get("data")
    return moved if data_digest(open_data(moved)) == trained_on else None


def is_there(data: DataConfig) -> bool:
    """Return whether every set that is kept on this machine is where the configuration says."""
    return all(map(_is_there, _places(data)))


def data_digest(dataset: Dataset | MixedDataset) -> str:
    """Return a short digest of what the tokens of data sets are, wherever they are kept."""
    return digest(
        part.dataset.manifest.model_dump_json(include={"vocab_size", "dtype", "splits"})
        for part in members_of(dataset)
    )


def digest(texts: Iterable[str]) -> str:
    """Return sixteen characters of the SHA-256 of texts."""
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def _places(data: DataConfig) -> list[str]:
    return [data.path or ""] if data.mix is None else list(data.mix)


def _is_there(place: str) -> bool:
    return is_url(place) or (Path(place) / MANIFEST).exists()


def _moved_with(place: str, run_folder: Path) -> str | None:
    ends = [Path(place).parts[start:] for start in range(1, len(Path(place).parts))]
    there = (above.joinpath(*end) for above in run_folder.resolve().parents for end in ends)
    return next((str(path) for path in there if (path / MANIFEST).is_file()), None)


def require_tokenizer(
    run_folder: Path, dataset: Dataset | MixedDataset, checkpoint: Path | None = None
) -> None:
    """Check that the dataset has the tokenizer that the run was trained with, which its checkpoint
    knows for certain.

    Raises: CheckpointError when its ids would mean something else to the model, or the run's own
            copy of the tokenizer is damaged.
    """
    kept, data = run_folder / TOKENIZER, members_of(dataset)[0].dataset
    found = hashlib.sha256(read_tokenizer(kept)).hexdigest() if kept.exists() else None
    known = (catalog.tokenizer_of(checkpoint) if checkpoint is not None else None) or found
    if found not in (known, None):
        raise CheckpointError(
            f"{kept} is damaged, or was replaced: the model was trained with another tokenizer.",
            fix=RESTORE,
        )
    if known not in (data.manifest.tokenizer.digest, None):
        raise CheckpointError(
            f"{data.origin} was prepared with another tokenizer than {run_folder} was trained with: its tokens would mean something else.",
            fix=f"Prepare the text with --tokenizer {in_shell(kept)}.",
        )
