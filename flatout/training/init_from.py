"""`train.init_from`: a run that begins with the weights of another. Data, schedule, optimiser, step
and generators are new.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flatout.config.schema import RunConfig
from flatout.data.store.mix import MixedDataset
from flatout.data.store.shards import Dataset
from flatout.errors import CheckpointError, ConfigError
from flatout.files import read_model
from flatout.models.language_model import model_of
from flatout.ops import Ops
from flatout.progress import SILENT, Progress
from flatout.recognised import recognise, require_local
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.read_write import stored_shapes
from flatout.training.checkpoint.state import weights_and_aliases
from flatout.training.run_dir import layout
from flatout.training.run_dir.config_seal import require_as_trained
from flatout.training.run_dir.data_location import require_tokenizer
from flatout.training.run_dir.lookup import RUNS, find_checkpoint, find_run
from flatout.trust import references_in

FREE_OF_WEIGHTS = (
    "chunk_size",
    "dropout",
    "initialisation",
    "max_seq_len",
    "memory",
    "rotary_base",
    "window",
)
"""Keys of a model that may be others than those its weights were trained with, as long as the
shapes agree: a continued run may read
longer windows, drop more, or state how fresh weights would be drawn. Any other key that differs
would make other functions of the same
weights."""
MOST_NAMED = 3
_BY_HAND = {
    False: "Set the keys of the model as they were there.",
    True: "Its model is code of its own, which nothing here has imported: read that code, then set model.kind yourself.",
}
"""What to do about other weights, by whether they are of a model whose code is not flatout's: that
is never given to be pasted.
"""


def begin_from(
    config: RunConfig, dataset: Dataset | MixedDataset, ops: Ops, *, progress: Progress = SILENT
) -> RunConfig:
    """Return the resolved configuration with the checkpoint that `train.init_from` names, once it
    is known to fit model and tokenizer.

    Raises: CheckpointError or ConfigError, with what does not fit and the keys to set.
    """
    if config.train.init_from is None:
        return config
    checkpoint = find_weights(config.train.init_from, progress=progress)
    run_folder = run_of(checkpoint)
    if run_folder is None:
        progress.say(
            f"{checkpoint} does not lie in its run's folder: whether its tokenizer is that of the data cannot be told."
        )
    else:
        require_tokenizer(run_folder, dataset, checkpoint)
    require_fit(config, checkpoint, run_folder, ops, progress)
    progress.say(f"Beginning with the weights of {checkpoint}.")
    return config.with_values({"train.init_from": str(checkpoint.absolute())})


def find_weights(init_from: str, *, progress: Progress = SILENT) -> Path:
    """Return the whole checkpoint that `init_from` is, or the best one of the run that it is (the
    last one, while no loss is known).

    Raises: CheckpointError when there is none.
    """
    require_local(init_from, "train.init_from=", error=CheckpointError)
    for place in (Path(init_from), RUNS / init_from):
        if catalog.is_checkpoint(place):
            catalog.require_whole(place, progress=progress)
            return place
    try:
        run_folder = find_run(init_from)
    except CheckpointError as error:
        known = recognise(Path(init_from))
        what = (
            known.instead_of("a run or a checkpoint")
            if known
            else "there is no such run or checkpoint."
        )
        raise CheckpointError(
            f"train.init_from={init_from}: {what}", fix=known.fix if known else error.fix
        ) from error
    return find_checkpoint(run_folder, progress=progress)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder that a checkpoint belongs to, None where it cannot be found."""
    place = checkpoint.absolute().parent
    if (place.parent / layout.CONFIG).exists():
        return place.parent
    owner = place / catalog.OWNER
    run_folder = Path(read_model(owner, catalog.Owner).run) if owner.exists() else None
    return run_folder if run_folder and (run_folder / layout.CONFIG).exists() else None


def require_fit(
    config: RunConfig, checkpoint: Path, run_folder: Path | None, ops: Ops, progress: Progress
) -> None:
    """Do nothing when the checkpoint has this model's tensors, in name and shape, and was trained
    as this model.

    Raises: ConfigError naming the first that differ, and the `model.` keys to set, as they can be
            pasted.
    """
    model_class, model_config = model_of(config)
    model = model_class.on_meta(model_config, ops)
    here = {name: tuple(tensor.shape) for name, tensor in weights_and_aliases(model)[0].items()}
    differ = list(_shapes_that_differ(stored_shapes(checkpoint), here))
    source = layout.read_config(run_folder) if run_folder else None
    if run_folder and source:
        require_as_trained(run_folder / layout.CONFIG, source)
    keys = _keys_that_differ(source, config) if source else {}
    wrong = [key for key in keys if key.removeprefix("model.") not in FREE_OF_WEIGHTS]
    if differ or wrong:
        named = differ[:MOST_NAMED] or [
            f"{key} is {keys[key]} there and {config.value(key)} here" for key in wrong[:MOST_NAMED]
        ]
        more = len(differ or wrong) - len(named)
        code = references_in({"model": {"kind": keys.get("model.kind")}})
        paste = "" if code else " ".join(f"{key}={_word(keys[key])}" for key in (wrong or keys))
        raise ConfigError(
            f"The weights of {checkpoint} are of another model: {'; '.join(named)}{f'; and {more} more' if more > 0 else ''}.",
            fix=f"Add these overrides: {paste} (as it was there)."
            if paste
            else _BY_HAND[bool(code)],
        )
    for key, value in keys.items():
        progress.say(
            f"{key} is {value} in the run whose weights this one begins with, and {config.value(key)} here."
        )


def _shapes_that_differ(
    there: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    for key in sorted({*there, *here}):
        name = key.removeprefix("model/")
        if key not in there:
            yield f"it has no {name}"
        elif key not in here:
            yield f"it has {name}, which this model lacks"
        elif there[key] != here[key]:
            yield f"{name} is {list(there[key])} there and {list(here[key])} here"


def _keys_that_differ(source: RunConfig, config: RunConfig) -> dict[str, Any]:
    """Return the `model.` keys of the source, with its values, that this run has otherwise."""
    there, here = source.model.model_dump(mode="json"), config.model.model_dump(mode="json")
    return {f"model.{key}": value for key, value in there.items() if here.get(key) != value}


def _word(value: Any) -> str:
    """Return a value as an override is written."""
    if isinstance(value, (list, dict)):
        return f"'{value}'"
    return value if isinstance(value, str) else json.dumps(value)
