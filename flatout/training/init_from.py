"""`train.init_from`: a new run takes the weights of a run or of another program, or adapts them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.architectures.hub import PREFIX
from flatout.architectures.source import ForeignWeights, find_model, is_foreign
from flatout.assembly.resolve import FREE_OF_WEIGHTS
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset, members_of
from flatout.data.tokenizers.hub import is_repository
from flatout.errors import CheckpointError, ConfigError
from flatout.export_mark import require_as_exported
from flatout.json_io import JsonObject, read_model
from flatout.models.language_model import model_of
from flatout.models.lora import adapters_of, with_adapters
from flatout.ops import Ops
from flatout.progress import SILENT, Progress
from flatout.recognised import recognise, require_local
from flatout.training.agreement import READING, together
from flatout.training.checkpoint import catalog, location
from flatout.training.checkpoint.catalog import Base, read_index
from flatout.training.checkpoint.contents import digest_of, find_base
from flatout.training.checkpoint.merged import MergedWeights, load_initial_weights, shapes_of
from flatout.training.checkpoint.weights import plain_name
from flatout.training.run_dir import layout
from flatout.training.run_dir.config_seal import require_as_trained
from flatout.training.run_dir.data_location import require_tokenizer, require_tokenizer_of
from flatout.training.run_dir.lookup import RUNS, find_checkpoint, find_run
from flatout.trust import references_in

if TYPE_CHECKING:
    from flatout.assembly.run import Run

MOST_NAMED = 3
SET_KEYS = "Set the model keys to the values of that run."
READ_CODE = (
    "That model is custom code, which was not imported: read it, then set model.kind yourself."
)
"""The fix for a model from custom code: its reference is never offered for pasting."""


def resolve_init_from(
    config: RunConfig, dataset: AnyDataset, ops: Ops, *, progress: Progress = SILENT
) -> RunConfig:
    """Check the checkpoint that `train.init_from` names, and return the config with its path.

    Raises: CheckpointError, ConfigError when the model or tokenizer differs, with the keys to set.
    """
    if config.train.init_from is None:
        return config
    if is_foreign(config.train.init_from):
        return _resolve_foreign(config, dataset, ops, progress)
    checkpoint = find_weights(config.train.init_from, progress=progress)
    run_folder = run_of(checkpoint)
    if run_folder is None:
        progress.say(
            f"{checkpoint} is not in its run directory: "
            "its tokenizer cannot be compared with the data's."
        )
    else:
        require_tokenizer(run_folder, dataset, checkpoint)
    require_fit(config, checkpoint, run_folder, ops, progress)
    progress.say(f"Starting with the weights of {checkpoint}.")
    return config.with_values({"train.init_from": str(checkpoint.absolute())})


def _resolve_foreign(
    config: RunConfig, dataset: AnyDataset, ops: Ops, progress: Progress
) -> RunConfig:
    """Check the model that `train.init_from` imports, and return the config with its path."""
    init_from = config.train.init_from or ""
    path = Path(init_from)
    if path.exists():
        require_as_exported(path if path.is_dir() else path.parent, progress=progress)
    found = find_model(init_from, progress=progress)
    model_class, model_config = model_of(config)
    model = model_class.on_meta(model_config, ops)
    ForeignWeights(found, model_config).require_fit(shapes_of(model))
    with_adapters(model, config.lora)
    folder = found.path if found.path.is_dir() else found.path.parent
    require_tokenizer_of(folder, members_of(dataset)[0].dataset, progress=progress)
    for key, theirs in found.keys.items():
        mine = config.value(f"model.{key}")
        if mine != theirs and key in FREE_OF_WEIGHTS:
            progress.say(f"model.{key} is {theirs} in the imported model, and {mine} here.")
    progress.say(f"Starting with the weights of {config.train.init_from}.")
    return config.with_values({"train.init_from": str(found.path.absolute())})


def find_weights(init_from: str, *, progress: Progress = SILENT) -> Path:
    """Return the checkpoint that `init_from` names, or the best (else last) one of that run.

    Raises: CheckpointError when there is none.
    """
    require_local(init_from, "train.init_from=", error=CheckpointError)
    for path in (Path(init_from), RUNS / init_from):
        if catalog.is_checkpoint(path):
            catalog.require_complete(path, progress=progress)
            return path
    try:
        run_folder = find_run(init_from)
    except CheckpointError as error:
        what, fix = "there is no such run or checkpoint.", error.fix
        known = recognise(Path(init_from))
        if is_repository(init_from) and not known:
            fix = f"{fix} A model of the Hugging Face hub is {PREFIX}{init_from}."
        if known:
            what, fix = known.instead_of("a run or a checkpoint"), known.fix
        raise CheckpointError(f"train.init_from={init_from}: {what}", fix=fix) from error
    return find_checkpoint(run_folder, progress=progress)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run directory that a checkpoint belongs to, or None."""
    folder = checkpoint.absolute().parent
    if (folder.parent / layout.CONFIG).exists():
        return folder.parent
    owner = folder / location.OWNER
    run_folder = Path(read_model(owner, location.Owner).run) if owner.exists() else None
    return run_folder if run_folder and (run_folder / layout.CONFIG).exists() else None


def load_initial(run: Run, checkpoint: Path | None, *, progress: Progress = SILENT) -> None:
    """Load the weights that a newly built run starts from, if there are any. Every rank calls it.

    These are those of train.init_from, unless the run resumes from `checkpoint`. A LoRA run needs
    the weights beside its adapters at every start; the checkpoint names them.
    Raises: CheckpointError when the weights are missing, damaged or have changed, or `checkpoint`
            is one of another kind of run.
    """
    mesh = run.mesh
    # The digest of a base costs a pass over its files: only the main rank computes it.
    found = together(mesh, lambda: _source(run, checkpoint) if mesh.is_main else None, READING)
    source, run.base = mesh.broadcast_object(found) or (None, None)
    if source is not None:
        load = partial(load_initial_weights, run.core, source, progress)
        together(mesh, load, READING)


def _source(run: Run, checkpoint: Path | None) -> tuple[Path | None, JsonObject | None]:
    """Return the checkpoint whose weights to load first, and `run.base` of a LoRA run."""
    adapters, init_from = adapters_of(run.core), run.config.train.init_from
    known = read_index(checkpoint).base if checkpoint is not None else None
    if checkpoint is not None and (known is None) is bool(adapters):
        raise _another_kind(checkpoint, run.config.lora.rank)
    if known is not None and checkpoint is not None:
        source: Path | None = find_base(checkpoint, known)
    else:
        source = Path(init_from) if checkpoint is None and init_from is not None else None
    if not adapters or source is None:
        return source, None
    rows = {plain_name(name): adapter.rows for name, adapter in adapters.items()}
    digest = known.digest if known is not None else digest_of(source)
    scale = next(iter(adapters.values())).scale  # the same in all layers
    return source, Base(
        path=str(source.resolve()), digest=digest, scale=scale, rows=rows
    ).model_dump()


def _another_kind(checkpoint: Path, rank: int | None) -> CheckpointError:
    """Return the error for a checkpoint of adapters in a run without, or the other way round."""
    start = f"start from its weights: train.init_from={checkpoint} instead of --resume."
    if rank is None:
        return CheckpointError(
            f"{checkpoint} contains LoRA adapters, and this run trains whole weights.",
            fix=f"Set the keys of lora as in its run, or {start}",
        )
    return CheckpointError(
        f"{checkpoint} contains whole weights, and this run trains LoRA adapters "
        f"(lora.rank={rank}).",
        fix=f"Leave lora.rank out, or {start}",
    )


def require_fit(
    config: RunConfig, checkpoint: Path, run_folder: Path | None, ops: Ops, progress: Progress
) -> None:
    """Check that the checkpoint has this model's tensors and was trained with the same model keys.

    With LoRA, check also that the model has the layers of lora.targets.

    Raises: ConfigError with the first differences, and the `model.` overrides to paste.
    """
    model_class, model_config = model_of(config)
    model = model_class.on_meta(model_config, ops)
    there = MergedWeights(checkpoint).shapes
    shapes = list(_shapes_that_differ(there, shapes_of(model)))
    source = layout.read_config(run_folder) if run_folder else None
    if run_folder and source:
        require_as_trained(run_folder / layout.CONFIG, source)
    keys = _keys_that_differ(source, config) if source else {}
    wrong = [key for key in keys if key.removeprefix("model.") not in FREE_OF_WEIGHTS]
    values = [f"{key} is {keys[key]} there and {config.value(key)} here" for key in wrong]
    if differences := shapes or values:
        listed = "; ".join(differences[:MOST_NAMED])
        if len(differences) > MOST_NAMED:
            listed += f"; and {len(differences) - MOST_NAMED} more"
        raise ConfigError(
            f"The weights of {checkpoint} belong to another model: {listed}.",
            fix=_overrides({key: keys[key] for key in (wrong or keys)}),
        )
    with_adapters(model, config.lora)
    for key, value in keys.items():
        progress.say(
            f"{key} is {value} in the run that the weights come from, and {config.value(key)} here."
        )


def _overrides(keys: JsonObject) -> str:
    """Return the fix that sets these model keys."""
    if references_in({"model": {"kind": keys.get("model.kind")}}):
        return READ_CODE
    overrides = " ".join(f"{key}={_word(value)}" for key, value in keys.items())
    return f"Add these overrides: {overrides} (the values of that run)." if keys else SET_KEYS


def _shapes_that_differ(
    there: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    for name in sorted({*there, *here}):
        if name not in there:
            yield f"it has no {name}"
        elif name not in here:
            yield f"it has {name}, which this model lacks"
        elif there[name] != here[name]:
            yield f"{name} is {list(there[name])} there and {list(here[name])} here"


def _keys_that_differ(source: RunConfig, config: RunConfig) -> JsonObject:
    """Return the `model.` keys whose values differ, with the source's values."""
    there, here = source.model.model_dump(mode="json"), config.model.model_dump(mode="json")
    return {f"model.{key}": value for key, value in there.items() if here.get(key) != value}


def _word(value: object) -> str:
    """Return a value in the syntax of an override."""
    if isinstance(value, (list, dict)):
        return f"'{value}'"
    return value if isinstance(value, str) else json.dumps(value)
