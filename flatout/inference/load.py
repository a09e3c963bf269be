"""Load a run directory: its config, the weights of one checkpoint, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from flatout.assembly.choices import assemble
from flatout.assembly.parts import Parts
from flatout.config.registry import SPEEDUPS
from flatout.config.schema import RunConfig
from flatout.data.store.manifest import TOKENIZER
from flatout.data.store.mix import AnyDataset, open_data
from flatout.data.tokenizers import load_tokenizer
from flatout.errors import CheckpointError, ConfigError, DataError, in_shell
from flatout.hardware.machine import pick_device, probe
from flatout.models.families.export_mark import require_as_exported
from flatout.models.families.exported import MODEL_TYPE
from flatout.models.families.source import ForeignWeights, find_model, is_foreign
from flatout.models.language_model import LanguageModel, allocate, new_model
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint.catalog import tokenizer_of
from flatout.training.checkpoint.merged import MergedWeights, read_merged, shapes_of
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import find_checkpoint, find_run, run_or_newest

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

MOST_CONTEXT = 4096
"""Positions of a model of another tool that are used: the cache has room for all of them."""
Arithmetic = Literal["fp32", "trained"]
"""Precision of a loaded model: fp32, or the one that the run was trained in."""


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with its tokenizer and config."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    parts: Parts
    folder: Path
    checkpoint: Path
    progress: Progress = SILENT
    """Where `dataset` reports a download."""
    opening: Sequence[int] = ()
    """Tokens with which another tool starts each text."""

    @cached_property
    def dataset(self) -> AnyDataset:
        """The training data, opened on first use.

        Raises: DataError when it is missing or cannot be downloaded.
        """
        try:
            return open_data(self.config.data)
        except DataError as error:
            moved = f"`flatout eval {in_shell(self.folder)} --data PATH`"
            fix = f"{error.fix} If the data was moved, pass its path: {moved}."
            raise DataError(error.what, fix=fix) from error


def load_run(
    run: str | Path,
    checkpoint: str | None = None,
    *,
    device: str = "auto",
    precision: Arithmetic = "fp32",
    trust_code: bool = False,
    progress: Progress = SILENT,
) -> LoadedRun:
    """Return a run's model with the weights of a checkpoint (`best`, `last` or a step).

    The adapters of a LoRA run are merged into the weights.

    The model uses those of the run's speedups that work on this machine, and is never compiled.
    `precision="fp32"` also skips speedups that lower the precision. `"trained"` keeps them, so that
    `flatout.evaluate` reproduces the run's own loss. `trust_code` allows the custom code named in
    config.yaml to be imported, now and later.
    Raises: CheckpointError, DataError or ConfigError when the run, checkpoint or tokenizer cannot
            be used, or `precision` is neither; UntrustedCode before any custom code is imported.
    """
    if precision not in get_args(Arithmetic):
        raise ConfigError(
            f"precision={precision!r} must be 'fp32' or 'trained'.", fix="Use one of the two."
        )
    folder = find_run(run)
    config = trusted_config(folder, trust_code=trust_code, progress=progress)
    if config is None or (config.data.path is None and config.data.mix is None):
        raise CheckpointError(
            f"{folder}/config.yaml names no dataset.",
            fix="Use a run directory written by `flatout train`.",
        )
    path = find_checkpoint(folder, checkpoint, progress=progress)
    device, _ = pick_device(device, probe())
    with progress.task(f"Loading {path.name} of {folder.name}"):
        parts = assemble(_usable_speedups(config, precision))
        model = new_model(config, parts.ops())
        allocate(model, "cpu", draws=False)
        weights = MergedWeights(path)
        require_fit(weights, model, folder)
        model.load_state_dict(read_merged(path, weights))
        model.to(device).eval()
        tokenizer = load_tokenizer(folder / TOKENIZER, sha256=tokenizer_of(path))
    return LoadedRun(model, tokenizer, config, parts, folder, path, progress)


def require_fit(weights: MergedWeights, model: LanguageModel, folder: Path) -> None:
    """Check that a checkpoint has the weights of the model in its run's config.yaml.

    Raises: CheckpointError naming the first that differs.
    """
    wanted, stored = shapes_of(model), weights.shapes
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            raise CheckpointError(
                f"The weights of {weights.checkpoint} do not fit the model in "
                f"{folder}/config.yaml: {name}.",
                fix="Restore config.yaml from a copy.",
            )


def load_model(
    model: str | Path | None,
    checkpoint: str | None = None,
    *,
    trust_code: bool = False,
    progress: Progress = SILENT,
) -> LoadedRun:
    """Return a run, None for the newest, or a model of another tool, exports included.

    Such a model is what `train.init_from` reads, with its tokenizer.json beside it. No code of its
    directory is executed. Its context is that of its configuration, up to MOST_CONTEXT.

    Raises: as `load_run`; ConfigError for `checkpoint` with such a model.
    """
    if model is None or not is_foreign(str(model)):
        folder = run_or_newest(model, progress=progress)
        return load_run(folder, checkpoint, trust_code=trust_code, progress=progress)
    if checkpoint not in (None, "best"):
        raise ConfigError(
            f"{model} is a single model. --checkpoint {checkpoint} cannot choose a different one.",
            fix="Remove --checkpoint, or name a run.",
        )
    found = find_model(str(model), progress=progress)
    folder = found.path if found.path.is_dir() else found.path.parent
    require_as_exported(folder, progress=progress)
    seq_len = min(found.keys.get("max_seq_len") or MOST_CONTEXT, MOST_CONTEXT)
    config = RunConfig.model_validate({"model": found.keys, "data": {"seq_len": seq_len}})
    device, _ = pick_device("auto", probe())
    parts = assemble([])
    built = new_model(config, parts.ops())
    allocate(built, "cpu", draws=False)
    weights = ForeignWeights(found, built)
    weights.require_fit(shapes_of(built))
    with progress.task(f"Loading {found.path.name}"):
        built.load_state_dict({name: weights.read(name) for name in weights.names()})
        built.to(device).eval()
    path = folder / TOKENIZER
    if not path.is_file():
        raise DataError(
            f"{folder} has no {TOKENIZER}, so its tokens have no text.",
            fix=f"Copy the {TOKENIZER} of the model there.",
        )
    tokenizer = load_tokenizer(path)
    is_own = found.architecture and MODEL_TYPE in found.architecture.classes
    opening = () if is_own else tokenizer.opening()
    return LoadedRun(built, tokenizer, config, parts, folder, found.path, progress, opening)


def _usable_speedups(config: RunConfig, precision: Arithmetic) -> Iterator[str]:
    """Yield the run's speedups that work here: a laptop can load a model trained on a GPU."""
    machine = probe()
    names = () if isinstance(config.speedups, str) else config.speedups
    for name in names:
        if ":" in name or name in SPEEDUPS.names():  # others are of a different version
            speedup = SPEEDUPS.get(name)
            is_narrow = precision == "fp32" and _lowers_precision(name)
            if not is_narrow and speedup.reason_against(machine, config) is None:
                yield name


def _lowers_precision(name: str) -> bool:
    """Return whether a speedup sets a precision below fp32, or needs one that does."""
    speedup = SPEEDUPS.get(name)
    return "precision" in speedup.sets or any(map(_lowers_precision, speedup.needs))
