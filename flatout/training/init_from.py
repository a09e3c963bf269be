"""`train.init_from`: a new run takes the weights of a run or of another tool, or adapts them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.assembly.shape import FREE_OF_WEIGHTS
from flatout.config.schema import RunConfig, override
from flatout.config.trust import references_in
from flatout.data.store.mix import AnyDataset, members_of
from flatout.data.tokenizers.hub import is_repository
from flatout.errors import CheckpointError, ConfigError
from flatout.models.families.export_mark import require_as_exported
from flatout.models.families.files import weight_files
from flatout.models.families.hub import PREFIX
from flatout.models.families.source import ForeignWeights, find_model, is_foreign
from flatout.models.language_model import model_of
from flatout.models.lora import adapters_of, with_adapters
from flatout.ops import Ops
from flatout.optim.moments import FP32, kept_by
from flatout.progress import SILENT, Progress, counted
from flatout.storage.files import require_checksums, writing_run
from flatout.storage.json_io import JsonObject
from flatout.storage.recognised import prepare_it, recognise, require_local
from flatout.storage.streams import shortened
from flatout.training.agreement import READING, together
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import Base, read_index
from flatout.training.checkpoint.contents import digest_of, find_base, keep_base
from flatout.training.checkpoint.merged import MergedWeights, load_initial_weights, shapes_of
from flatout.training.checkpoint.weights import parameter_names, plain_name
from flatout.training.run_dir import layout
from flatout.training.run_dir.data_location import require_tokenizer, require_tokenizer_of
from flatout.training.run_dir.lookup import RUNS, find_checkpoint, find_run

if TYPE_CHECKING:
    from flatout.assembly.run import Run

SET_KEYS = "Set the model keys to the values of that run."
READ_CODE = (
    "That model is custom code, which was not imported: read it, then set model.kind yourself."
)
"""The fix for a model from custom code: its reference is never offered for pasting."""


def resolve_init_from(
    config: RunConfig, dataset: AnyDataset, ops: Ops, *, progress: Progress = SILENT
) -> RunConfig:
    """Check the weights that `train.init_from` names, and return the config with their path.

    With LoRA, check also that the model has the layers of lora.targets.
    Raises: CheckpointError, ConfigError when the model or tokenizer differs, with the keys to set.
    """
    init_from = config.train.init_from
    if init_from is None:
        return config
    model_class, model_config = model_of(config)
    model = model_class.on_meta(model_config, ops)
    if is_foreign(init_from):
        given = Path(init_from)
        if given.exists():
            require_as_exported(given if given.is_dir() else given.parent, progress=progress)
        found = find_model(init_from, for_run=config.lora.rank is None, progress=progress)
        path, theirs = found.path, found.keys
        for file in weight_files(path):
            require_checksums(file)
        ForeignWeights(found, model).require_fit(shapes_of(model))
        folder = path if path.is_dir() else path.parent
        require_tokenizer_of(folder, members_of(dataset)[0].dataset, progress=progress)
    else:
        path = find_weights(init_from, progress=progress)
        run_folder = run_of(path)
        source = layout.read_config(run_folder) if run_folder else None
        if run_folder is None or source is None:
            progress.say(
                f"{path} is not in its run directory: "
                "its tokenizer cannot be compared with the data's."
            )
        else:
            require_tokenizer(run_folder, dataset, path)
        theirs = source.model.model_dump(mode="json") if source else {}
        _require_fit(config, path, theirs, shapes_of(model))
    with_adapters(model, config.lora)
    for key, value in theirs.items():
        mine = config.value(f"model.{key}")
        if mine != value and key in FREE_OF_WEIGHTS:
            progress.say(f"model.{key} is {value} where the weights come from, and {mine} here.")
    progress.say(f"Starting with the weights of {path}.")
    return config.with_values({"train.init_from": str(path.absolute())})


def require_source(init_from: str, progress: Progress) -> None:
    """Check that the run or checkpoint which `train.init_from` names can be read, if it is here.

    Raises: CheckpointError.
    """
    is_here = Path(init_from).exists() or (RUNS / init_from).exists()
    if init_from and is_here and not is_foreign(init_from):
        find_weights(init_from, progress=progress)


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
        elif Path(init_from).is_file():
            what, fix = "it is a file of neither weights nor tokens.", prepare_it(Path(init_from))
        raise CheckpointError(f"train.init_from={init_from}: {what}", fix=fix) from error
    return find_checkpoint(run_folder, progress=progress)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run directory that a checkpoint belongs to, or None."""
    folder = checkpoint.absolute().parent.parent
    return folder if (folder / layout.CONFIG).exists() else None


def load_initial(run: Run, checkpoint: Path | None, *, progress: Progress = SILENT) -> None:
    """Load the weights that a newly built run starts from, if there are any. Every rank calls it.

    These are those of train.init_from, unless the run resumes from `checkpoint`. A LoRA run needs
    the weights beside its adapters at every start. The checkpoint names them.
    Raises: CheckpointError when the weights are missing, damaged or have changed, or `checkpoint`
            is one of a different kind of run.
    """
    mesh = run.mesh
    # The digest of a base costs a pass over its files: only rank 0 computes it.
    found = together(mesh, lambda: _source(run, checkpoint) if mesh.is_main else None, READING)
    source, run.base = mesh.broadcast_object(found) or (None, None)
    if source is not None:
        load = partial(load_initial_weights, run.core, source, progress)
        together(mesh, load, READING)
        if checkpoint is None and is_foreign(str(source)):
            together(mesh, partial(load_moments, run, source, progress), READING)


def load_moments(run: Run, source: Path, progress: Progress) -> None:
    """Take AdamW's moments from where another tool saved the initial weights, if they are there."""
    names, optimizer = parameter_names(run), run.optimizers[0]
    weights = ForeignWeights(find_model(str(source), for_run=True), run.core)
    found = weights.moments(names.values())
    if found is None:
        return
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if run.base is not None:
        found = "are of whole weights, and this run trains adapters"
    elif run.mesh.device_mesh is not None:
        found = "are whole, and this run shards its weights"
    elif {kept_by(optimizer, parameter) for parameter in own} != {FP32}:
        found = "are AdamW's in fp32, and this run's optimizer keeps others"
    if isinstance(found, str):
        progress.say(f"The optimizer's moments start at zero: those of {source} {found}.")
        return
    state = dict(enumerate(found[names[parameter]] for parameter in own))
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    progress.say(
        f"AdamW continues after {counted(int(state[0]['step']), 'step')} with the moments of "
        f"{source}."
    )


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
    with writing_run(run.folder):
        source = keep_base(run.folder, source, digest)
    scale = next(iter(adapters.values())).scale  # the same in all layers
    return source, Base(
        path=str(source.resolve()), digest=digest, scale=scale, rows=rows
    ).model_dump()


def _another_kind(checkpoint: Path, rank: int | None) -> CheckpointError:
    """Return the error for a checkpoint of adapters in a run without, or the other way round."""
    start = f"start from its weights: train.init_from={checkpoint} instead of --resume."
    if rank is None:
        return CheckpointError(
            f"{checkpoint} contains LoRA adapters, but this run trains whole weights.",
            fix=f"Set the keys of lora as in its run, or {start}",
        )
    return CheckpointError(
        f"{checkpoint} contains whole weights, but this run trains LoRA adapters "
        f"(lora.rank={rank}).",
        fix=f"Remove lora.rank, or {start}",
    )


def _require_fit(
    config: RunConfig,
    checkpoint: Path,
    theirs: JsonObject,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Check that the checkpoint has these weights and was trained with the same model keys.

    Raises: ConfigError with the first differences, and the `model.` overrides to paste.
    """
    found, mine = MergedWeights(checkpoint).shapes, config.model.model_dump(mode="json")
    keys = {f"model.{key}": value for key, value in theirs.items() if mine.get(key) != value}
    wrong = [key for key in keys if key.removeprefix("model.") not in FREE_OF_WEIGHTS]
    differences = [
        f"{name} is {_shape(found, name)} there and {_shape(shapes, name)} here"
        for name in sorted({*found, *shapes})
        if found.get(name) != shapes.get(name)
    ] or [f"{key} is {keys[key]} there and {config.value(key)} here" for key in wrong]
    if not differences:
        return
    overrides = " ".join(override(key, keys[key]) for key in (wrong or keys))
    fix = f"Add these overrides: {overrides} (the values of that run)." if keys else SET_KEYS
    if references_in({"model": {"kind": keys.get("model.kind")}}):
        fix = READ_CODE
    raise ConfigError(
        f"The weights of {checkpoint} belong to a different model: "
        f"{shortened(differences, 3, '; ')}.",
        fix=fix,
    )


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return str([*shapes[name]]) if name in shapes else "missing"
